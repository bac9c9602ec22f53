"""TRL's GRPOTrainer with predicted rewards and an eighth of the groups executed for real.

    python examples/trl_grpo.py          # a minute on a CPU; needs pip install 'wmrl-embodied[trl]'

A tiny language model learns to write the letter that its prompt asks for. `execute` stands for a sandbox that runs a
program, `predict` for a model that grades it unseen: half-blind and too kind.
"""

import tempfile

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer

from wmrl_embodied.core import AnchoredReward, AnchorSchedule, RewardCorrector

LETTERS = "abcdefgh"


def execute(prompts, completions, **columns):
    """Share of the letters that are the wanted one: what is true, and dear."""
    return [text.split().count(prompt) / 8 for prompt, text in zip(prompts, completions, strict=True)]


def predict(prompts, completions, **columns):
    """What a grader guesses from the first half alone."""
    halves = [" ".join(text.split()[:4]) for text in completions]
    return [min(1.0, 2 * seen) ** 0.5 for seen in execute(prompts, halves)]


def tiny_model(seed: int = 0):
    """A tokenizer of ten words and a model of two layers, made here: nothing is downloaded."""
    words = {word: place for place, word in enumerate(["[PAD]", "[EOS]", *LETTERS])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[PAD]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", eos_token="[EOS]")
    torch.manual_seed(seed)
    config = GPT2Config(vocab_size=len(words), n_positions=16, n_embd=32, n_layer=2, n_head=2)
    config.bos_token_id = config.eos_token_id = words["[EOS]"]
    config.pad_token_id = words["[PAD]"]
    return GPT2LMHeadModel(config), wrapped


def main(steps: int = 60) -> tuple[float, int]:
    """Train; returns the mean executed reward of the last steps and the number of executions."""
    model, tokenizer = tiny_model()
    reward = AnchoredReward(
        execute, predict, group_size=8, corrector=RewardCorrector("wmrl", AnchorSchedule(0.125))
    )
    with tempfile.TemporaryDirectory() as folder:
        trainer = GRPOTrainer(
            model=model,
            processing_class=tokenizer,
            reward_funcs=reward,
            train_dataset=Dataset.from_dict({"prompt": list(LETTERS) * 8}),
            args=GRPOConfig(
                output_dir=folder,
                scale_rewards="none",  # they are advantages already
                num_generations=8,
                per_device_train_batch_size=64,
                max_completion_length=8,
                max_steps=steps,
                learning_rate=1e-2,
                lr_scheduler_type="constant",
                temperature=1.0,
                beta=0.0,
                logging_steps=5,
                save_strategy="no",
                report_to=[],
                use_cpu=True,
            ),
        )
        trainer.train()
    logged = [row["executed"] for row in trainer.state.log_history if "executed" in row]
    print(
        f"executed reward {logged[0]:.2f} -> {logged[-1]:.2f} with {reward.corrector.executions} executions"
    )
    print(f"of {steps * 64} completions")
    return logged[-1], reward.corrector.executions


if __name__ == "__main__":
    main()
