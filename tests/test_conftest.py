"""The fixtures themselves: what every other test relies on."""


def test_tiny_tokenizer_has_the_trap_pad_equals_eos(tiny_tokenizer, tiny_model):
    assert tiny_tokenizer.pad_token_id == tiny_tokenizer.eos_token_id == 2
    assert tiny_tokenizer.bos_token == "<|im_start|>"
    ids = tiny_tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], add_generation_prompt=True)[
        "input_ids"
    ]
    assert tiny_tokenizer.decode(ids) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert tiny_model.config.vocab_size == len(tiny_tokenizer)
