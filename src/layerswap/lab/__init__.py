"""The lab: a small multilingual world with trained models, for a laptop's CPU.

`assets.shipped()` opens the models that come with the package, `questions` their questions, and
`quickstart` runs layerswap on both. `research/lab` of the repository built them. Imports are cheap:
torch and transformers are imported when needed.
"""
