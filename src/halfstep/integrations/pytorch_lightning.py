"""`halfstep.integrations.lightning` for who imports `pytorch_lightning`, whose Trainer takes its own classes alone."""

# what both share lies there, and its extra brings both packages
from halfstep.integrations.lightning import FabricMixin, TrainerMixin

try:
    from lightning_fabric.plugins.precision.half import HalfPrecision as FabricHalfPrecision
    from pytorch_lightning.plugins.precision.half import HalfPrecision
    from pytorch_lightning.utilities.model_helpers import is_overridden
except ImportError as error:
    raise ImportError(
        "halfstep.integrations.pytorch_lightning needs PyTorch Lightning: pip install 'halfstep[lightning]'"
    ) from error


class Float16Precision(TrainerMixin, HalfPrecision):
    """Train in float16 in the Trainer of `pytorch_lightning`: see `halfstep.integrations.lightning`."""

    is_overridden = staticmethod(is_overridden)


class Float16FabricPrecision(FabricMixin, FabricHalfPrecision):
    """Train in float16 in the Fabric of `lightning_fabric`: see `halfstep.integrations.lightning`."""
