"""Pieces of HLO text."""

CYCLES = 'backend_config={"window_config":{"estimated_cycles":"%d"}}'


SHAPE = "f32[64,32]"


def computation(name: str, *lines: str) -> str:
    return "\n".join([f"%{name} (p: {SHAPE}) -> {SHAPE} {{", f"  %{name}.p = {SHAPE} parameter(0)", *lines, "}", ""])


PRODUCT = computation(
    "product", f"  ROOT %p1 = {SHAPE} convolution(%product.p, %product.p), dim_labels=bf_io->bf"
).replace("%product.p, %product.p", "%product.p, %w")


PRODUCT = PRODUCT.replace("  ROOT", "  %w = f32[32,32] constant({...})\n  ROOT")
