"""Shows what runs have measured: `python -m l2d_jax.report --workdir DIR [DIR ...]`.

It shows the loss by t and the teacher-forced accuracy against the budget, and the scores of evaluations. Each workdir
gets a `report.html`, which loads no other file, and the figures as PNG and SVG. The table of the paper's tasks has the
rows of all workdirs.
"""

from l2d_jax import command_line, console


def make_parser() -> command_line.Parser:
    """The options of the program."""
    parser = command_line.Parser("report", description=__doc__)
    folder, workdirs = command_line.folder_or_bucket, "workdirs, or folders that evaluations wrote with --out"
    parser.add_argument("--workdir", type=folder, nargs="+", required=True, help=workdirs)
    beside = 'JSON file with further rows for the tables, such as those of the paper: {"label": {"gsm8k": 0.5}}'
    parser.add_argument("--beside", type=command_line.local_path, help=beside)
    return parser


def main() -> None:
    """Parse the command line and report every workdir."""
    options = make_parser().parse_args()
    with console.starting():
        from l2d_jax.programs import report
    report.run(options)


if __name__ == "__main__":
    command_line.run(main)
