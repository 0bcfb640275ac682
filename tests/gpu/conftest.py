import pytest
import torch


def _missing() -> str | None:
    if not torch.cuda.is_available():
        return "needs a Hopper GPU: no CUDA device here"
    capability = torch.cuda.get_device_capability(0)
    return None if capability == (9, 0) else f"needs a Hopper GPU: this one has compute capability {capability}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = _missing()
    if reason is not None:
        for item in items:
            if "/gpu/" in str(item.path):
                item.add_marker(pytest.mark.skip(reason=reason))
