"""What runs inside a copy of transformers' own tests: its testers of models and of generation, on the class of a path.

`tests/weights/test_transformers_suite.py` copies this file beside them and compares the outcomes with its list.
"""

import functools
import inspect
import unittest
from typing import ClassVar

from transformers import GenerationMixin, LlamaConfig

from l2d_jax.weights.pytorch import modeling_l2d
from l2d_jax.weights.pytorch.configuration_l2d import L2DConfig
from tests.test_modeling_common import GenerationTesterMixin, ModelTesterMixin, ids_tensor

PATH = {
    "width": 16,
    "translation_width": 20,
    "frequency_width": 12,
    "condition_width": 24,
    "lora_rank": 4,
    "start": "anchored",
}


class L2DForCausalLM(modeling_l2d.L2DForCausalLM, GenerationMixin):
    """The class, but for the name of `noise`, which the testers take for a masked autoencoder's."""

    @functools.wraps(modeling_l2d.L2DForCausalLM.forward)
    def forward(self, *given, **options):
        return super().forward(*given, **options)

    _full = inspect.signature(modeling_l2d.L2DForCausalLM.forward)
    forward.__signature__ = _full.replace(
        parameters=[part for name, part in _full.parameters.items() if name != "noise"]
    )


class L2DTester:
    """A tiny path beside a tiny Llama, and inputs for both."""

    batch_size, seq_length, vocab_size, hidden_size = 2, 7, 99, 32
    num_hidden_layers, num_attention_heads, is_training = 2, 4, True

    def __init__(self, parent: unittest.TestCase) -> None:
        self.parent = parent

    def get_config(self) -> L2DConfig:
        text = LlamaConfig(
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            intermediate_size=37,
            num_hidden_layers=self.num_hidden_layers,
            num_attention_heads=self.num_attention_heads,
            num_key_value_heads=2,
            max_position_embeddings=512,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
        )
        return L2DConfig(path=PATH, text_config=text, budget=3)

    def prepare_config_and_inputs_for_common(self):
        ids = ids_tensor([self.batch_size, self.seq_length], self.vocab_size)
        return self.get_config(), {"input_ids": ids, "attention_mask": ids.new_ones(ids.shape)}


class L2DModelTest(ModelTesterMixin, GenerationTesterMixin, unittest.TestCase):
    """Each of transformers' tests that this class inherits."""

    all_model_classes = (L2DForCausalLM,)
    pipeline_model_mapping: ClassVar[dict[str, type]] = {}

    def setUp(self) -> None:
        self.model_tester = L2DTester(self)

    def _prepare_for_class(self, inputs_dict, model_class, return_labels=False):
        inputs = super()._prepare_for_class(inputs_dict, model_class, return_labels=False)
        return inputs | {"labels": inputs["input_ids"]} if return_labels else inputs
