"""The lab: a small multilingual world with trained models, for a laptop's CPU.

`assets.shipped()` finds the models that come with the package, `scoring` says how well a model
does, `build` trains everything anew. Importing any of it is cheap; torch and transformers are
imported when first needed.
"""
