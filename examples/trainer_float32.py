"""Train a small Llama on the source of Python's standard library with the Hugging Face Trainer.

trainer_float32.py is the same in float32; `diff` shows what float16 changes.
"""

import argparse

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Trainer, TrainingArguments

from halfstep.cli.text import load_text

DTYPE = torch.float32
SHAPE = {"hidden_size": 96, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}


def main() -> None:
    """Train, and print the loss of text that was held out."""
    parser = argparse.ArgumentParser(description="Train a small Llama with the Hugging Face Trainer.")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--out", default="runs/trainer", help="where checkpoints go")
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint")
    parser.add_argument("--cpu", action="store_true", help="leave GPUs alone")
    args = parser.parse_args()

    torch.manual_seed(0)
    arguments = TrainingArguments(
        args.out,
        max_steps=args.steps,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=2,
        learning_rate=3e-3,
        lr_scheduler_type="cosine",
        warmup_steps=10,
        logging_steps=10,
        save_steps=50,
        report_to="none",
        use_cpu=args.cpu,
    )
    text = load_text(None, 64)
    train = [tokens for number in range(2 * args.steps) for tokens in text.batch(0, number, 8, 64)]
    held_out = list(text.validation_windows(64, 64))
    trainer = Trainer(
        model=AutoModelForCausalLM.from_config(LlamaConfig.from_dict({"vocab_size": 256, **SHAPE}), dtype=DTYPE),
        args=arguments,
        train_dataset=[{"input_ids": tokens, "labels": tokens} for tokens in train],
        eval_dataset=[{"input_ids": tokens, "labels": tokens} for tokens in held_out],
    )
    trainer.train(resume_from_checkpoint=args.resume)
    print(f"evaluation loss {trainer.evaluate()['eval_loss']:.4f}")


if __name__ == "__main__":
    main()
