"""halfstep: train PyTorch models whose weights and gradients are 16 bits, with the result of float32 training."""

from halfstep.clipping import clip_grad_norm_
from halfstep.optimizers import SGD, Adam, AdamW, Lion
from halfstep.products import float32_products, native_float16_products
from halfstep.scaler import GradScaler
from halfstep.teaching import AdamFP16, GradScalerFP16, WeightDecay

__all__ = [
    "SGD",
    "Adam",
    "AdamFP16",
    "AdamW",
    "GradScaler",
    "GradScalerFP16",
    "Lion",
    "WeightDecay",
    "clip_grad_norm_",
    "float32_products",
    "native_float16_products",
]
__version__ = "0.1.0"
