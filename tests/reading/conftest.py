from no_hub import no_hub  # noqa: F401
