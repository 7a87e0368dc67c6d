"""Converts models: `python -m l2d_jax.convert import …`, `… export …` and `… publish …`.

`import` makes a model folder from a Hugging Face folder, a hub id or a GGUF file. It can add the path of a checkpoint
of the authors' release, or a LoRA adapter of PEFT. It also reads a published folder that PyTorch has trained further.
`export` writes a model folder for other programs: the release (`l2d`, `l2d-full`), transformers (`hf`), PEFT (`peft`).
`publish` uploads a trained path to the hub, as a folder that this package can load, and transformers without it.
"""

from l2d_jax import command_line, console
from l2d_jax.command_line import folder_or_bucket, local_path, model_name
from l2d_jax.config.choices import EXPORT_FORMATS
from l2d_jax.errors import require


def make_parser() -> command_line.Parser:
    """The options of the program."""
    parser = command_line.Parser("convert", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, parser_class=command_line.Parser)
    importing = commands.add_parser("import", help="make a model folder")
    base = "a Hugging Face folder, a hub id or a GGUF file"
    importing.add_argument("--base", type=model_name, required=True, help=base)
    importing.add_argument("--l2d", type=local_path, help="a checkpoint of the authors' release")
    importing.add_argument("--hyperparameters", type=local_path, help="keyword arguments of that checkpoint, as JSON")
    adapter = "a folder with a LoRA adapter of the base, as PEFT writes it"
    importing.add_argument("--adapter", type=local_path, help=adapter)
    exporting = commands.add_parser("export", help="write a model for other programs")
    model = "a model folder, or a workdir that has finished"
    exporting.add_argument("--model", type=model_name, required=True, help=model)
    exporting.add_argument("--format", required=True, choices=EXPORT_FORMATS, help="format to write")
    exporting.add_argument(
        "--torch", action="store_true", help="for l2d and l2d-full: write pytorch_model.bin; needs torch"
    )
    for command in (importing, exporting):
        command.add_argument("--out", type=folder_or_bucket, required=True, help="a new folder")
    publishing = commands.add_parser("publish", help="upload a trained path to the hub")
    publishing.add_argument(
        "--workdir", type=folder_or_bucket, required=True, help="workdir of a run that has finished"
    )
    publishing.add_argument("--repo", type=model_name, required=True, help="repository on the hub, org/name")
    at_base = (
        "org/name@revision of the base on the hub, if training read it from a folder (default: its newest revision)"
    )
    publishing.add_argument("--base", type=model_name, help=at_base)
    publishing.add_argument(
        "--dry_run", type=local_path, help="a new folder: write the files there, and upload nothing"
    )
    return parser


def main() -> None:
    """Parse the command line and convert."""
    options = make_parser().parse_args()
    if options.command == "import":
        are_both = (options.l2d is None) == (options.hyperparameters is None)
        require(are_both, "--l2d and --hyperparameters go together: give both or neither")
    with console.starting():
        from l2d_jax.programs import convert
    convert.run(options)


if __name__ == "__main__":
    command_line.run(main)
