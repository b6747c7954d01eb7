# Behind torchvision/extension.py, by `make .venv/torchvision`: the build of the package index needs
# CUDA's libraries, and beside a CPU torch its import fails for want of its operators' schemas. They
# are of detection, and nobody calls them here: a schema without a kernel is enough.
if not _has_ops():  # noqa: F821  its own
    _schemas = torch.library.Library("torchvision", "DEF")  # noqa: F821
    for _name in ("nms", "qnms"):
        _schemas.define(f"{_name}(Tensor input) -> Tensor")
