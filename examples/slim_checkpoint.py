"""Remove the optimizer and trainer state from a checkpoint. The new file has about a third of the size.

The metadata is kept (variant, classes, input format). The file works as MODEL.WEIGHTS, but not for --resume.

Example:
    python examples/slim_checkpoint.py output/vil_tiny/model_final.pth vil_tiny_coco.safetensors
"""

from pathlib import Path

from torch import Tensor

from backbones import ConfigError
from backbones.checkpoint_files import check_writable, read_checkpoint, write_checkpoint
from projects_vil.checkpoint import METADATA_KEY
from vil.arguments import ToolParser, existing_path, output_file, run_tool


def slim_checkpoint(source: str | Path, output: str | Path) -> list[str]:
    """Copy the weights and metadata of a detector, without the state of optimizer, scheduler and trainer.

    Use the copy for ``MODEL.WEIGHTS``, evaluation and export. Training cannot resume from it.

    Args:
        source: A ``.pth`` or ``.safetensors`` checkpoint of this project or of detectron2.
        output: A ``.pth`` or ``.safetensors`` file. An existing file is replaced, unless it is the source.

    Returns:
        The sizes of both files and the keys that were left out, as lines of text.

    Raises:
        ConfigError: If the source cannot be read or is not a detector, if both files are the same, or if the output
            cannot be written.
    """
    source, output = Path(source), Path(output)
    check_writable(output)
    if source.exists() and output.exists() and source.samefile(output):
        raise ConfigError(f"The output '{output}' is the source. Choose another file.")
    contents = read_checkpoint(source)
    model = contents.get("model")
    if not isinstance(model, dict) or not all(isinstance(value, Tensor) for value in model.values()):
        raise ConfigError(f"'{source}' has no state dict of tensors under 'model'. Use a checkpoint of detectron2.")
    kept = {key: value for key, value in contents.items() if key in ("model", METADATA_KEY)}
    write_checkpoint(output, kept)
    before, after = (path.stat().st_size / 1e6 for path in (source, output))
    removed = ", ".join(sorted(str(key) for key in contents.keys() - kept.keys())) or "nothing"
    lines = [f"{before:.1f} MB before, {after:.1f} MB now; left out: {removed}"]
    if METADATA_KEY not in contents:
        lines.append("the file has no metadata (variant, classes, input format)")
    return lines


def main() -> None:
    parser = ToolParser(__doc__)
    parser.add_argument("source", type=existing_path, metavar="SOURCE", help="checkpoint of a training run")
    parser.add_argument("output", type=output_file, metavar="OUTPUT", help="file to write, .pth or .safetensors")
    args = parser.parse_args()
    print("\n".join([*slim_checkpoint(args.source, args.output), f"wrote {args.output}"]))


if __name__ == "__main__":
    run_tool(main)
