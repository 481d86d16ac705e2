"""Makes a small Qwen3 checkpoint that can use an agent's tools, but badly.

Where no weights can be downloaded (CI, an aeroplane), this stands in for a pretrained model: a
byte-level BPE tokenizer with Qwen3's special tokens and chat template, a randomly initialised
`Qwen3ForCausalLM` of about a million parameters, and a warm-up on transcripts of a scripted expert
who is sloppy on purpose. The result is an ordinary Hugging Face folder; the trainer sees nothing
but `model.path`.

    python -m examples.starter_model --expert examples.quickstart.expert:transcript --out DIR
"""
