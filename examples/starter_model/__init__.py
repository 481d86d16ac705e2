"""Makes a small Qwen3 checkpoint that can use an agent's tools, but often makes mistakes.

It replaces a pretrained model where no weights can be downloaded, such as in CI. It consists of a
byte-level BPE tokenizer with Qwen3's special tokens and chat template, and a randomly initialised
`Qwen3ForCausalLM` of about a million parameters, which is trained on transcripts of a scripted
expert that makes mistakes on purpose. The result is an ordinary Hugging Face folder, which the
trainer reads from `model.path`.

    python -m examples.starter_model --expert examples.quickstart.expert:transcript --out DIR
"""
