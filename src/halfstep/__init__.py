"""halfstep: train PyTorch models whose weights and gradients are 16 bits, with the result of float32 training."""

from halfstep.optimizers import SGD, Adam, AdamFP16, AdamW, Lion, WeightDecay
from halfstep.products import float32_products, native_float16_products
from halfstep.scaler import GradScaler, GradScalerFP16

__all__ = [
    "SGD",
    "Adam",
    "AdamFP16",
    "AdamW",
    "GradScaler",
    "GradScalerFP16",
    "Lion",
    "WeightDecay",
    "float32_products",
    "native_float16_products",
]
__version__ = "0.1.0"
