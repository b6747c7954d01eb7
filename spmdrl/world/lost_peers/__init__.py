"""How a rank finds out that another rank is gone, and what it reports before it ends."""
