"""The lab: a small multilingual world with trained models, for a laptop's CPU.

`assets.shipped()` opens the models that come with the package, `scoring` scores a model, and
`build` trains everything anew. Imports are cheap: torch and transformers are imported when needed.
"""
