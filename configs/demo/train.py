"""Trains the demo models: recall over their context, and plausible Python.

    python configs/demo/train.py --out configs/demo/model --minutes 9                 # one GPU
    python configs/demo/train.py --out configs/demo/hybrid --minutes 8 --hybrid

A Qwen3 of about 6 million parameters, or a Qwen3.5 of 7 million, three of whose four layers keep a recurrent state,
with a byte-level BPE tokenizer of its own. Recall is learned on a curriculum:
the list grows by half whenever recent batches were answered well, first as bare text, then in chats too. Code is the
standard library of the Python that runs this script. The learning rate is constant and cools down over the last third.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import random
import sysconfig
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import PreTrainedModel, Qwen3_5ForCausalLM, Qwen3_5TextConfig, Qwen3Config, Qwen3ForCausalLM

from baton.cluster.recall import SYLLABLES, TOKENS_PER_PAIR, TOKENS_PER_QUESTION

VOCAB_SIZE = 4096
END_OF_TEXT, SYSTEM, USER, ASSISTANT, END = "<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"
SPECIAL_TOKENS = [END_OF_TEXT, SYSTEM, USER, ASSISTANT, END]
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- if message.role not in ('system', 'user', 'assistant') -%}"
    "{{ raise_exception('this model knows the roles system, user and assistant, not ' + message.role) }}"
    "{%- endif -%}"
    "<|{{ message.role }}|>{{ message.content }}<|end|>"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}"
)
RECALL_TOKENS, CODE_TOKENS = 49152, 16384  # of one step
IGNORE = -100


def standard_library() -> list[str]:
    paths = sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py"))
    texts = [p.read_text(encoding="utf-8", errors="ignore") for p in paths if "site-packages" not in p.parts]
    return [text for text in texts if len(text) > 200]


def train_tokenizer(texts: list[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    often = "".join(SYLLABLES) * 20_000  # every syllable must become one token
    tokenizer.train_from_iterator(itertools.chain(texts, [often]), trainer)
    for syllable in SYLLABLES:
        assert len(tokenizer.encode(syllable).ids) == 1, f"{syllable!r} is not one token"
    return tokenizer


class RecallBatches:
    """Draws recall sequences on the device, as bare text or as chats; several questions follow each list."""

    def __init__(self, tokenizer: Tokenizer, device: str) -> None:
        def token(text: str) -> int:
            ids = tokenizer.encode(text).ids
            assert len(ids) == 1, f"{text!r} is {len(ids)} tokens"
            return ids[0]

        self.device = device
        self.syllables = torch.tensor([token(s) for s in SYLLABLES], device=device)
        self.newline, self.ask = token("\n"), token("?")
        self.user, self.assistant, self.end = token(USER), token(ASSISTANT), token(END)

    def draw(self, num_pairs: int, num_tokens: int, chat: bool) -> tuple[Tensor, Tensor]:
        """Token ids and labels, both [n, length], `num_tokens` in all. Labels: the answers with their ends."""
        num_questions = random.randint(2, 6)
        turn = TOKENS_PER_QUESTION + 3 + (3 if chat else 0)
        n = max(1, num_tokens // (num_pairs * TOKENS_PER_PAIR + num_questions * turn))
        keys = self._distinct_keys(n, num_pairs)
        values = torch.randint(65536, (n, num_pairs), device=self.device)
        parts = [self._constant(self.user, n)] if chat else []
        parts.append(self._pairs(keys, values))
        labels = [torch.full_like(part, IGNORE) for part in parts]
        for number in range(num_questions):
            which = torch.randint(num_pairs, (n, 1), device=self.device)
            question, answer = self._turn(keys.gather(1, which), values.gather(1, which), chat, first=number == 0)
            parts += [question, answer]
            labels += [torch.full_like(question, IGNORE), answer]
        return torch.cat(parts, 1), torch.cat(labels, 1)

    def _constant(self, token: int, n: int) -> Tensor:
        return torch.full((n, 1), token, device=self.device)

    def _two(self, codes: Tensor) -> Tensor:
        """[n, m] numbers below 65 536 -> [n, m, 2] syllable tokens."""
        return self.syllables[torch.stack([codes // 256, codes % 256], -1)]

    def _distinct_keys(self, n: int, num_pairs: int) -> Tensor:
        if num_pairs <= 16:  # two of 65 536 are equal in one sequence of five hundred at most
            return torch.randint(65536, (n, num_pairs), device=self.device)
        return torch.rand(n, 65536, device=self.device).topk(num_pairs, sorted=False).indices

    def _pairs(self, keys: Tensor, values: Tensor) -> Tensor:
        newline = torch.full((*keys.shape, 1), self.newline, device=self.device)
        return torch.cat([self._two(keys), self._two(values), newline], -1).flatten(1)

    def _turn(self, key: Tensor, value: Tensor, chat: bool, first: bool) -> tuple[Tensor, Tensor]:
        n = key.shape[0]
        before = [self._constant(self.user, n)] if chat and not first else []
        after = [self._constant(self.end, n), self._constant(self.assistant, n)] if chat else []
        ending = self._constant(self.end if chat else self.newline, n)
        question = torch.cat([*before, self._constant(self.ask, n), self._two(key).flatten(1), *after], 1)
        return question, torch.cat([self._two(value).flatten(1), ending], 1)


class Curriculum:
    """How many pairs a list has. Half as many again whenever recent batches are answered well enough."""

    PASS, WINDOW, MOST = 0.96, 6, 480

    def __init__(self) -> None:
        self.num_pairs = 2
        self.recent: deque[float] = deque(maxlen=self.WINDOW)

    def draw(self) -> int:
        """The hardest size six times out of ten, else an easier one."""
        return self.num_pairs if random.random() < 0.6 else math.ceil(self.num_pairs ** random.random())

    def report(self, num_pairs: int, accuracy: float) -> None:
        if num_pairs != self.num_pairs:
            return
        self.recent.append(accuracy)
        if len(self.recent) == self.WINDOW and sum(self.recent) / self.WINDOW > self.PASS:
            self.num_pairs = min(self.MOST, self.num_pairs + max(1, self.num_pairs // 2))
            self.recent.clear()


def code_batches(tokenizer: Tokenizer, texts: list[str], device: str) -> Iterator[Tensor]:
    """Endless random crops, [CODE_TOKENS / length, length]."""
    end = tokenizer.token_to_id(END_OF_TEXT)
    stream = [token for e in tokenizer.encode_batch(texts) for token in [*e.ids, end]]
    tokens = torch.tensor(stream, device=device)
    print(f"code: {len(texts)} files, {len(tokens) / 1e6:.1f} M tokens", flush=True)
    while True:
        length = random.choice([256, 512, 1024, 2048])
        starts = torch.randint(len(tokens) - length, (CODE_TOKENS // length, 1), device=device)
        yield tokens[starts + torch.arange(length, device=device)]


def loss_of(model: PreTrainedModel, tokens: Tensor, labels: Tensor) -> tuple[Tensor, float]:
    """Mean cross entropy over the labels that are not IGNORE, and the share of answers that greedy decoding gets."""
    hidden = model.model(input_ids=tokens).last_hidden_state[:, :-1]
    targets = labels[:, 1:]
    where = targets != IGNORE
    logits = model.lm_head(hidden[where]).float()
    loss = torch.nn.functional.cross_entropy(logits, targets[where])
    with torch.no_grad():
        right = torch.ones_like(targets, dtype=torch.bool)
        right[where] = logits.argmax(-1) == targets[where]
        # An answer to a question is two tokens and its end. Code has no answers; what this says of it is not used.
        exact = right[where].view(-1, 3)[:, :2].all(-1) if int(where.sum()) % 3 == 0 else right[where]
    return loss, exact.float().mean().item()


def learning_rate(progress: float, step: int, peak: float) -> float:
    warm = min(1.0, (step + 1) / 200)
    return peak * warm * min(1.0, (1.0 - progress) * 3)


def train(model: PreTrainedModel, tokenizer: Tokenizer, texts: list[str], seconds: float, device: str) -> None:
    recall, code = RecallBatches(tokenizer, device), code_batches(tokenizer, texts, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.98), weight_decay=0.01, fused=True)
    text, chat, start = Curriculum(), Curriculum(), time.monotonic()
    for step in itertools.count():
        progress = (time.monotonic() - start) / seconds
        if progress >= 1:
            break
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(progress, step, 1e-3)
        as_chat = text.num_pairs > 32 and random.random() < 0.4  # what bare text taught makes chats easy
        curriculum = chat if as_chat else text
        num_pairs = curriculum.draw()
        with torch.autocast(device, torch.bfloat16):
            recall_loss, accuracy = loss_of(model, *recall.draw(num_pairs, RECALL_TOKENS, as_chat))
            python = next(code)
            code_loss, _ = loss_of(model, python, python)
        (recall_loss + 0.5 * code_loss).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        curriculum.report(num_pairs, accuracy)
        if step % 200 == 0:
            print(
                f"{time.monotonic() - start:6.0f} s  step {step:6d}  "
                f"pairs {text.num_pairs:4d} in text {chat.num_pairs:4d} in chats  "
                f"recall {recall_loss:.3f} ({accuracy:.3f} of {num_pairs} right)  code {code_loss:.3f}",
                flush=True,
            )


@torch.inference_mode()
def evaluate(model: PreTrainedModel, tokenizer: Tokenizer, device: str) -> dict[str, float]:
    """Share of right answers by length and form, in the weights' own precision."""
    recall, result = RecallBatches(tokenizer, device), {}
    for length, chat in itertools.product((64, 128, 256, 512, 1000, 1500, 2000, 3000), (False, True)):
        pairs = length // TOKENS_PER_PAIR
        right = [loss_of(model, *recall.draw(pairs, 65536, chat))[1] for _ in range(12)]
        result[f"{length} {'chat' if chat else 'text'}"] = sum(right) / len(right)
    return result


def save(model: PreTrainedModel, tokenizer: Tokenizer, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    described = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": CHAT_TEMPLATE,
        "eos_token": END,
        "pad_token": END_OF_TEXT,
        "model_max_length": model.config.max_position_embeddings,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(described, indent=1) + "\n")


def make_model(hybrid: bool, ends: list[int], padding: int) -> PreTrainedModel:
    common = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 256,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
        "eos_token_id": ends,
        "bos_token_id": None,
        "pad_token_id": padding,
    }
    rope = {"rope_type": "default", "rope_theta": 10_000.0}
    if not hybrid:
        config = Qwen3Config(**common, intermediate_size=768, num_hidden_layers=6, rope_parameters=rope)
        return Qwen3ForCausalLM(config)
    return Qwen3_5ForCausalLM(
        Qwen3_5TextConfig(
            **common,
            intermediate_size=640,
            num_hidden_layers=8,
            layer_types=[*["linear_attention"] * 3, "full_attention"] * 2,
            rope_parameters={**rope, "partial_rotary_factor": 0.25},
            linear_num_key_heads=4,
            linear_num_value_heads=4,
            linear_key_head_dim=32,
            linear_value_head_dim=64,
            linear_conv_kernel_dim=4,
        )
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--hybrid", action="store_true", help="three of four layers with a recurrent state")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    random.seed(options.seed)
    torch.manual_seed(options.seed)
    texts = standard_library()
    tokenizer = train_tokenizer(texts)
    end, end_of_text = tokenizer.token_to_id(END), tokenizer.token_to_id(END_OF_TEXT)
    model = make_model(options.hybrid, [end, end_of_text], end_of_text).to(device)
    model.config._attn_implementation = "sdpa"
    print(f"{sum(p.numel() for p in model.parameters()) / 1e6:.1f} M parameters on {device}", flush=True)
    train(model, tokenizer, texts, options.minutes * 60, device)
    model.eval().to(torch.bfloat16)
    model.generation_config.temperature = None
    print("recall by length, bfloat16:", {n: round(a, 4) for n, a in evaluate(model, tokenizer, device).items()})
    save(model, tokenizer, options.out)


if __name__ == "__main__":
    main()
