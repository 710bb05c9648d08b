"""Print the tables of docs/model_zoo.md."""

from projects_vil.checkpoint import read_zoo

COLUMNS = {
    "variant": "variant",
    "config": "config",
    "img_size": "image size",
    "chunk_size": "chunk sizes",
    "params": "params",
    "box_ap": "box AP",
    "mask_ap": "mask AP",
    "top1": "top-1",
    "miou": "mIoU",
}


def zoo_tables() -> str:
    """Return the tables of docs/model_zoo.md. Files whose host is down are last."""
    zoo, lines = read_zoo(), []
    groups = {entry.group["title"]: entry.group for entry in zoo.values()}
    for title, group in sorted(groups.items(), key=lambda item: "unreachable" in item[1]):
        entries = {name: entry for name, entry in zoo.items() if entry.group["title"] == title}
        columns = {key: label for key, label in COLUMNS.items() if key in group["columns"]}
        is_in_name = all(name.startswith(f"{entry.variant}_") for name, entry in entries.items())
        if is_in_name and "img_size" not in columns:
            columns.pop("variant", None)
        lines += [f"## {title}\n", f"{group['trained_on']}. [Source]({group['source']}), {group['license']}."]
        if "unreachable" in group:
            lines.append(f"**The host has been down since 2024** ([report]({group['unreachable']})).")
        if "note" in group:
            lines.append(f"Note: {group['note']}.")
        lines += ["", f"| name | {' | '.join(columns.values())} |", f"|{'---|' * (len(columns) + 1)}"]
        for name, entry in entries.items():
            config = f"[{entry.config}](../configs/{entry.config}.yaml)"
            values = {"variant": f"`{entry.variant}`", "config": config, "params": entry.params, **entry.figures}
            values |= {
                "img_size": entry.img_size,
                "chunk_size": ", ".join(map(str, entry.chunk_size or ["in the file"])),
            }
            cells = [f"[`{name}`]({entry.url})", *(str(values.get(key, "")) for key in columns)]
            lines.append(f"| {' | '.join(cells)} |")
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    print(zoo_tables(), end="")
