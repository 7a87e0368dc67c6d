"""The variants of a config file as a table: what each trains, and what it is."""

from l2d_jax import models
from l2d_jax.accounting import trainable_parameters
from l2d_jax.config_file import find_variants, read_config
from l2d_jax.errors import InputError


def variant_table(reference: str) -> str:
    """A line for `FILE.py` or `FILE.py:variants` as it is, and one for each variant that may be added to it.

    Raises `InputError` as `read_config` does; a variant that contradicts the reference has the reason in its line.
    """
    rows = [("-", trained(reference), f"{reference} as it is")]
    taken = reference.partition(":")[2].split(",")
    for name, variant in find_variants(reference).items():
        if name in taken:
            continue
        try:
            count = trained(f"{reference}{',' if ':' in reference else ':'}{name}")
            rows.append((name, count, (variant.__doc__ or "").partition("\n")[0]))
        except InputError as error:
            rows.append((name, "refused", str(error)))
    rows.insert(0, ("variant", "trained", ""))
    width, digits = (max(len(row[column]) for row in rows) for column in (0, 1))
    return "\n".join(f"{name:<{width}}  {count:>{digits}}  {what}".rstrip() for name, count, what in rows)


def trained(reference: str) -> str:
    """The trainable parameters of a config, from shapes alone."""
    config = read_config(reference)
    return f"{trainable_parameters(config, models.read_architecture(config.model)):,}"
