"""MkDocs hook: write the reference pages from the code, and check links to files outside of docs/."""

import argparse
import ast
import contextlib
import inspect
import logging
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from vil import cli

ROOT = Path(__file__).resolve().parents[1]
# Files outside of docs/ that are pages of the site.
PAGES = {"changelog.md": "CHANGELOG.md", "contributing.md": "CONTRIBUTING.md"}
# Source files whose generated page a link leads to. The pages exist only in the site, and the files also on GitHub.
GENERATED = {"projects_vil/config.py": "config", "vil/cli.py": "cli", "projects_vil/__init__.py": "api"}
# The API reference has the names in `__all__` of both packages, and these.
ALSO_PUBLIC = {
    "backbones": ["backbone.Backbone", "convert.convert_state_dict", "convert.ConversionReport"],
    "projects_vil": ["inference.Detections", "inference.predict", "export.export_detector", "export.ExportedModel"],
}
_CONFIG_HEADER = """# Config reference

The keys that this project adds to detectron2's config. Set them in a YAML file, or as `KEY VALUE` on the command line.
detectron2's own keys are in its [config reference](https://detectron2.readthedocs.io/en/latest/modules/config.html).
"""
_LINK = re.compile(r"(?<!!)\[([^]\n]*)\]\(([^)#:\s]+)(#[^)\s]*)?\)")
_logger = logging.getLogger("mkdocs.hooks.reference")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages."""
    pages = {"config": config_reference(), "cli": cli_reference(), "api": api_reference()}
    for name, content in pages.items():
        files.append(File.generated(config, f"reference/{name}.md", content=content))
    for name, source in PAGES.items():
        files.append(File.generated(config, name, abs_src_path=str(ROOT / source)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point links to files outside of docs/ to the repository; without ``repo_url`` keep their text only."""
    source = ROOT / PAGES.get(page.file.src_uri, f"docs/{page.file.src_uri}")

    def replace(link: re.Match) -> str:
        text, target, anchor = link[1], (source.parent / link[2]).resolve(), link[3] or ""
        if (name := GENERATED.get(os.path.relpath(target, ROOT))) is not None:
            target = ROOT / f"docs/reference/{name}.md"
        if target.is_relative_to(ROOT / "docs") or not target.is_relative_to(ROOT):
            path = os.path.relpath(target, (ROOT / "docs" / page.file.src_uri).parent)
            return f"[{text}]({Path(path).as_posix()}{anchor})"
        if not target.exists():
            _logger.warning("%s links to %s, which does not exist", source.relative_to(ROOT), link[2])
        path = target.relative_to(ROOT).as_posix()
        return f"[{text}]({config.repo_url.rstrip('/')}/blob/main/{path}{anchor})" if config.repo_url else text

    return _LINK.sub(replace, markdown)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Remove the Sphinx roles of docstrings."""
    return re.sub(r":(?:attr|class|func|meth|mod):(<code>)~?", r"\1", html)


# Config --------------------------------------------------------------------------------------------------------------


def config_keys(source: str) -> Iterator[tuple[str, str, str]]:
    """Yield key, default and comment of the keys that ``add_vil_config`` adds, in the order of the file.

    A comment describes the keys below it up to a blank line or the next comment. A comment above a blank line is
    yielded without a key.

    Args:
        source: the text of ``projects_vil/config.py``.

    Raises:
        ValueError: if a key has no comment.
    """
    (function,) = [node for node in ast.parse(source).body if getattr(node, "name", "") == "add_vil_config"]
    lines = source.splitlines()
    assignments = {node.lineno: node for node in function.body if isinstance(node, ast.Assign)}
    comment: list[str] = []
    for number in range(function.body[0].end_lineno + 1, function.end_lineno + 1):
        line, above = lines[number - 1].strip(), lines[number - 2].strip()
        if line.startswith("#"):
            comment = [*(comment if above.startswith("#") else []), line.removeprefix("#").strip()]
        elif not line:
            if above.startswith("#"):
                yield "", "", " ".join(comment)
            comment = []
        elif number in assignments:
            node = assignments[number]
            key, value = ast.unparse(node.targets[0]).removeprefix("cfg."), ast.unparse(node.value)
            if value.startswith("CfgNode("):
                continue
            if not comment:
                raise ValueError(f"config key {key} has no comment: describe it above its line in add_vil_config")
            yield key, value, " ".join(comment)


def config_reference() -> str:
    """Return the page of config keys."""
    table, note = "\n| Key | Default | Effect |\n|---|---|---|\n", ""
    sections: dict[str, str] = {}
    for key, default, comment in config_keys((ROOT / "projects_vil/config.py").read_text(encoding="utf-8")):
        if not key:
            note = f"\n{comment}\n{table}"
            continue
        parts = key.split(".")
        section = ".".join(parts[: 2 if parts[0] == "MODEL" else 1]) if len(parts) > 1 else "Other keys"
        row = _row(f"`{key}`", f"`{default}`", comment)
        sections[section] = sections.get(section, f"\n## {section}\n{table}") + note + row
        note = ""
    return _CONFIG_HEADER + "".join(sections[section] for section in sorted(sections))


def _row(*cells: str) -> str:
    return f"| {' | '.join(cell.replace('|', '&#124;') for cell in cells)} |\n"


# Command line --------------------------------------------------------------------------------------------------------


def parser_of(*command: str) -> argparse.ArgumentParser:
    """Return the parser whose help ``vil COMMAND --help`` prints."""
    parsers: list[argparse.ArgumentParser] = []
    print_help = mock.patch.object(argparse.ArgumentParser, "print_help", lambda parser: parsers.append(parser))
    with print_help, mock.patch.object(sys, "argv", ["vil", *command, "--help"]), contextlib.suppress(SystemExit):
        cli.main()
    return parsers[0]


def cli_reference() -> str:
    """Return the page of commands."""
    text = "# Command line\n\n| Command | Purpose |\n|---|---|\n"
    parsers = {name: parser_of(name) for name in cli.COMMANDS}
    for name, parser in parsers.items():
        text += _row(f"[`vil {name}`](#vil-{name})", parser.description.splitlines()[0])
    return text + "".join(_command(parser) for parser in parsers.values())


def _command(parser: argparse.ArgumentParser) -> str:
    description, _, example = (parser.description or "").partition("\nExample:\n")
    text = f"\n## {parser.prog}\n\n{description.strip()}\n"
    if example:
        text += f"\n```bash\n{inspect.cleandoc(example).strip()}\n```\n"
    rows, subcommands, formatter = "", "", parser._get_formatter()
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            subcommands += "".join(map(_command, action.choices.values()))
        elif action.help is None:
            raise ValueError(f"{parser.prog}: argument {_invocation(action)} has no help")
        elif action.dest != "help" and action.help != argparse.SUPPRESS:
            rows += _row(f"`{_invocation(action)}`", formatter._expand_help(action))
    text += f"\n| Argument | Effect |\n|---|---|\n{rows}" if rows else ""
    return text + (f"\n{parser.epilog}\n" if parser.epilog else "") + subcommands


def _invocation(action: argparse.Action) -> str:
    metavar = action.metavar or (f"{{{','.join(action.choices)}}}" if action.choices else action.dest.upper())
    values = " ".join(metavar) if isinstance(metavar, tuple) else "" if action.nargs == 0 else metavar
    many = "..." if action.nargs in ("+", "*") else ""
    return f"{', '.join(action.option_strings)} {values}{many}".strip()


# API -----------------------------------------------------------------------------------------------------------------


def public_names(package: str) -> list[str]:
    """Return the names in the ``__all__`` of a package, without importing it."""
    for node in ast.parse((ROOT / package / "__init__.py").read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return ast.literal_eval(node.value)
    raise ValueError(f"package {package} has no __all__")


def api_reference() -> str:
    """Return the page of public names, which mkdocstrings fills with their docstrings."""
    text = "# API reference\n"
    for package, also in ALSO_PUBLIC.items():
        names = [*public_names(package), *also]
        text += f"\n## {package}\n\n" + "".join(f"::: {package}.{name}\n\n" for name in names)
    return text
