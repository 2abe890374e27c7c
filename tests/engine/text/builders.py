"""Small tokenizers for tests that need no model."""

from __future__ import annotations

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from engine.text.template import ChatTemplate
from engine.text.tokenizer import TextModel

CHATML = (
    "{% for m in messages %}"
    "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def make_text(
    template: str | None = CHATML, adds_start: bool = False, specials: tuple[str, ...] = (), **extra: object
) -> TextModel:
    """256 byte tokens (ids 0..255 are those bytes), then `<|im_start|>` 256 and `<|im_end|>` 257 (EOS).

    `specials`: further special tokens, from 258 on. `adds_start`:
    256 is put before what is encoded with special tokens, as a BOS would be.
    """
    alphabet = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in alphabet]
    chars = {byte: chr(byte) for byte in alphabet} | {byte: chr(0x100 + i) for i, byte in enumerate(rest)}
    tokenizer = Tokenizer(models.BPE(vocab={chars[byte]: byte for byte in range(256)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(mark, special=True) for mark in ("<|im_start|>", "<|im_end|>", *specials)]
    )
    if adds_start:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<|im_start|> $A", special_tokens=[("<|im_start|>", 256)]
        )
    compiled = ChatTemplate(template, {"eos_token": "<|im_end|>"}) if template else None
    return TextModel(tokenizer, name="bytes", eos_ids=[257], template=compiled, **extra)  # type: ignore[arg-type]
