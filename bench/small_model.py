"""What a small model would draft along recorded answers, in one pass over each of them.

A greedy chain's token is accepted as long as the answer agrees, and then the model has read the answer itself: its
choices along the answer say how far its chain is accepted at every position.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, DynamicCache

from agentspec.cache.automaton import Int32s
from agentspec.cache.history import common_prefix
from agentspec.commands.models import pulled
from agentspec.config import Config, ModelConfig
from agentspec.traces.rescue import greedy_chains, no_chains

CHUNK = 512


class SmallModel:
    """A model on the CPU, and what it has read last. An answer that ends beyond its window gets no chains."""

    def __init__(self, name: str) -> None:
        folder = Path(name).expanduser()
        found = folder if folder.is_dir() else pulled(name, Config(model=ModelConfig(name=name)))
        self.model: Any = AutoModelForCausalLM.from_pretrained(found, dtype=torch.float32)
        self.window = int(self.model.config.max_position_embeddings)
        self.read = np.empty(0, np.int32)
        self.cache = DynamicCache()

    def chains(self, prompt: Int32s, answer: Int32s) -> Int32s:
        """Chains at the positions of an answer."""
        if prompt.size + answer.size > self.window:
            return no_chains(prompt, answer)
        return greedy_chains(self.choices(prompt, answer), answer)

    @torch.inference_mode()
    def choices(self, prompt: Int32s, answer: Int32s) -> Int32s:
        """The model's own token in the place of each of an answer."""
        text = np.concatenate((prompt, answer[:-1]))
        known = min(common_prefix(self.read, text), prompt.size - 1)
        if known < self.read.size:
            self.cache.crop(known - self.read.size)
        chosen = []
        for start in range(known, text.size, CHUNK):
            part = torch.from_numpy(text[start : start + CHUNK].astype(np.int64))[None]
            hidden = self.model.model(part, cache=self.cache, use_cache=True).last_hidden_state[0]
            asked = hidden[max(prompt.size - 1 - start, 0) :]
            chosen.append(self.model.lm_head(asked).argmax(-1).numpy().astype(np.int32))
        self.read = text
        return np.concatenate(chosen)
