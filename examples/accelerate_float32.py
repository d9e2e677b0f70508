"""Train a small Llama on the source of Python's standard library with Accelerate, on a CPU or on GPUs.

accelerate_float32.py is the same in float32; `diff` shows what float16 changes.
"""

import argparse

import torch
from accelerate import Accelerator
from torch.optim import AdamW
from transformers import AutoModelForCausalLM, LlamaConfig, get_cosine_schedule_with_warmup

from halfstep.cli.text import load_text

DTYPE = torch.float32


def main() -> None:
    """Train, and print the loss of text that was held out."""
    parser = argparse.ArgumentParser(description="Train a small Llama with Accelerate.")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--cpu", action="store_true", help="leave GPUs alone")
    args = parser.parse_args()

    torch.manual_seed(0)
    accelerator = Accelerator(cpu=args.cpu, gradient_accumulation_steps=2)
    shape = {"hidden_size": 96, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = AutoModelForCausalLM.from_config(LlamaConfig.from_dict({"vocab_size": 256, **shape}), dtype=DTYPE)
    optimizer = AdamW(model.parameters(), lr=3e-3)
    scheduler = get_cosine_schedule_with_warmup(optimizer, 10, args.steps)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)

    text = load_text(None, 64)
    for number in range(2 * args.steps):
        # each process has its own batches
        tokens = text.batch(accelerator.process_index, number, 8, 64).to(accelerator.device)
        with accelerator.accumulate(model):
            loss = model(input_ids=tokens, labels=tokens).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        if number % 20 == 19:
            accelerator.print(f"step {(number + 1) // 2}: loss {loss.item():.4f}")

    model.eval()
    with torch.no_grad():
        tokens = text.validation_windows(64, 64).to(accelerator.device)
        loss = model(input_ids=tokens, labels=tokens).loss
    accelerator.print(f"validation loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
