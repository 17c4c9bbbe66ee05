"""The evidence behind the docs: experiments on the lab, tables and figures."""
