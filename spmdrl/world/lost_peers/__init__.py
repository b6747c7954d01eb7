"""What a rank knows of the others: where they are, whether they live, how it ends without them."""
