"""Train a small Llama on the source of Python's standard library with Lightning's Trainer.

lightning_float32.py is the same in float32; `diff` shows what float16 changes.
"""

import argparse
from typing import Any

from lightning import LightningModule, Trainer, seed_everything
from torch import Tensor
from torch.optim import AdamW
from torch.utils.data import DataLoader, TensorDataset
from transformers import AutoModelForCausalLM, LlamaConfig, get_cosine_schedule_with_warmup

from halfstep.cli.text import load_text


class Language(LightningModule):
    """A Llama that learns to continue text."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        shape = {"hidden_size": 96, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
        self.model = AutoModelForCausalLM.from_config(LlamaConfig.from_dict({"vocab_size": 256, **shape}))
        self.steps = steps

    def training_step(self, batch: list[Tensor]) -> Tensor:
        """Return the loss of a batch."""
        return self.model(input_ids=batch[0], labels=batch[0]).loss

    def validation_step(self, batch: list[Tensor]) -> None:
        """Measure text that was held out."""
        self.log("validation loss", self.training_step(batch))

    def configure_optimizers(self) -> Any:
        """Warm up, and cool down to the end."""
        optimizer = AdamW(self.parameters(), lr=3e-3)
        scheduler = get_cosine_schedule_with_warmup(optimizer, 10, self.steps)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


def main() -> None:
    """Train, and show the loss of text that was held out."""
    parser = argparse.ArgumentParser(description="Train a small Llama with Lightning.")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--out", default="runs/lightning", help="where the checkpoint and the log go")
    args = parser.parse_args()

    seed_everything(0)
    text, module = load_text(None, 64), Language(args.steps)
    train, held_out = text.batch(0, 0, 16 * args.steps, 64), text.validation_windows(64, 64)
    trainer = Trainer(precision="32-true", max_epochs=1, gradient_clip_val=1.0, default_root_dir=args.out)
    trainer.fit(module, DataLoader(TensorDataset(train), batch_size=16))
    trainer.validate(module, DataLoader(TensorDataset(held_out), batch_size=64))


if __name__ == "__main__":
    main()
