"""`python site/build.py`: make the pages in out/pages and build the site of them in out/site."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from docsite import browser, checks, gallery, notebooks, pages, reference
from rooftrace._writing import write_bytes

ROOT = Path(__file__).resolve().parents[1]
DRAWN = ROOT / "out" / "gallery"


def main(arguments: Sequence[str] | None = None) -> int:
    """Make what was asked for; 1 where the site is not whole, each trouble on a line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--notebooks", type=Path, metavar="FOLDER", help="write only these")
    parser.add_argument(
        "--keep-pictures", action="store_true", help="draw only pictures that are not there yet"
    )
    options = parser.parse_args(arguments)
    if options.notebooks:
        for path in notebooks.write_notebooks(options.notebooks):
            print(path)
        return 0
    draw_gallery(options.keep_pictures)
    folder = ROOT / "out" / "pages"
    shutil.rmtree(folder, ignore_errors=True)
    write_pages(folder / "pages")
    write_settings(folder / "mkdocs.yml")
    site = build(folder / "mkdocs.yml")
    troubles = [
        *(
            f"{source}:{each}"
            for source in pages.sources()
            for each in checks.blocks((ROOT / source).read_text(encoding="utf-8"))
        ),
        *checks.troubles(site),
        *browser.troubles(site),
    ]
    for trouble in troubles:
        print(trouble, file=sys.stderr)
    print(f"{len(list(site.rglob('*.html')))} pages in {site / 'index.html'}")
    return 1 if troubles else 0


def draw_gallery(keep: bool) -> None:
    """Run the scripts of the gallery."""
    for each in gallery.entries():
        out = DRAWN / each.name
        if keep and all((out / file).exists() for file in each.readings):
            continue
        start = time.monotonic()
        gallery.draw(each, out)
        for file in each.readings:
            if file.endswith(".html"):
                browser.photograph(out / file, out / f"{Path(file).stem}.png", "explore")
        print(f"drew {each.path.name} in {time.monotonic() - start:.0f} s", flush=True)


def write_pages(out: Path) -> None:
    """Write every page of the site as Markdown, with the pictures and files that they show."""
    resolve = pages.resolver()
    for source, page in pages.sources().items():
        text = pages.text_of(source, resolve)
        if source == pages.GALLERY:
            drawn = (
                gallery.section(each, DRAWN / each.name, f"gallery/{each.name}")
                for each in gallery.entries()
            )
            text = gallery.with_list(text, "\n" + "".join(drawn))
        put(out / page, text)
    for folder, place in pages.ASSETS.items():
        shutil.copytree(ROOT / folder, out / place)
    shutil.copytree(DRAWN, out / "gallery")
    shutil.copytree(ROOT / "site" / "theme", out / "theme")
    for script in notebooks.scripts():
        put(
            out / "examples" / f"{script.stem}.md",
            notebooks.page(script, notebooks.run(notebooks.notebook(script))),
        )
        shutil.copy(script, out / "examples" / script.name)
    notebooks.write_notebooks(out / "examples")
    put(out / "reference" / "index.md", reference.index())
    for name in reference.public_names():
        put(out / reference.page_of(name), reference.page(name))


def put(path: Path, text: str) -> None:
    """Write a page, and its folder where there is none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_bytes(path, text.encode())


def write_settings(path: Path) -> None:
    """Write the settings with the public names in the navigation."""
    import yaml

    settings = pages.settings()
    for entry in settings["nav"]:
        if isinstance(entry, dict) and "reference/index.md" in entry.values():
            (title,) = entry
            entry[title] = reference.navigation()
    write_bytes(path, yaml.safe_dump(settings, sort_keys=False).encode())


def build(settings: Path) -> Path:
    """Build the site with MkDocs, whose warnings are errors; the folder of the site."""
    os.environ["NO_MKDOCS_2_WARNING"] = "1"
    from mkdocs.commands.build import build as mkdocs_build
    from mkdocs.config import load_config
    from mkdocs.exceptions import Abort

    config = load_config(str(settings))
    try:
        config.plugins.on_startup(command="build", dirty=False)
        mkdocs_build(config)
    except Abort as error:
        raise SystemExit(error.code) from None
    finally:
        config.plugins.on_shutdown()
    return Path(config.site_dir)


if __name__ == "__main__":
    sys.exit(main())
