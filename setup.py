"""What pyproject.toml cannot say: the wheel carries the examples and pinned requirements, and its page has whole links.

A wheel works outside a checkout: `gyre demo` trains `gyre/examples/quickstart.toml`, as `make demo` does here.
"""

import re
import tomllib
from pathlib import Path
from shutil import copytree, ignore_patterns

from setuptools import setup
from setuptools.command.build_py import build_py

HERE = Path(__file__).parent
CARRIED = ("examples", "requirements")
"""Directories of the checkout that lie in the package of a wheel."""


class BuildWithExamples(build_py):
    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            for name in CARRIED:
                target = Path(self.build_lib) / "gyre" / name
                copytree(HERE / name, target, dirs_exist_ok=True, ignore=ignore_patterns("__pycache__", "runs"))


def page() -> str:
    """README.md with absolute links, for a page that is not beside the files."""
    home = tomllib.loads((HERE / "pyproject.toml").read_text())["project"]["urls"]["Repository"]
    text = (HERE / "README.md").read_text()
    text = re.sub(r"(!\[[^]]*\]\()(?!https?:|#)", rf"\1{home}/raw/main/", text)
    return re.sub(r"((?<!!)\[[^]]*\]\()(?!https?:|#)", rf"\1{home}/blob/main/", text)


setup(cmdclass={"build_py": BuildWithExamples}, long_description=page(), long_description_content_type="text/markdown")
