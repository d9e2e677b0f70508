"""halfstep: train PyTorch models whose weights and gradients are 16 bits, with the result of float32 training."""

from halfstep.clipping import clip_grad_norm_
from halfstep.ema import EMA
from halfstep.optimizers import SGD, Adam, AdamW, Lion
from halfstep.products import float32_products, native_float16_products
from halfstep.safe import load_safetensors, save_safetensors
from halfstep.scaler import GradScaler
from halfstep.schedulers import hold_scheduler
from halfstep.teaching import AdamFP16, GradScalerFP16, WeightDecay
from halfstep.torch_state import torch_state_dict
from halfstep.weights import float32_state_dict, load_weights

__all__ = [
    "EMA",
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
    "float32_state_dict",
    "hold_scheduler",
    "load_safetensors",
    "load_weights",
    "native_float16_products",
    "save_safetensors",
    "torch_state_dict",
]
__version__ = "0.1.0"
