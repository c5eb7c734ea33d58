"""Pages are made from templates by jinja2, which torch brings along. It is loaded when a page is made: drawing on a
terminal does without.

All text is escaped on its way into a page, lone surrogates included. What is HTML already is a `Markup`, which only
templates make, and drawings of numbers alone.
"""

from base64 import b64encode
from functools import cache
from hashlib import sha256
from importlib.resources import files
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jinja2 import Environment
    from markupsafe import Markup


def filled(template: str, package: str = "gapless.view", **values: Any) -> "Markup":
    """A template of the package, with these values in its places."""
    return html(_environment(package).get_template(template).render(values))


def html(source: str) -> "Markup":
    """What is not to be escaped."""
    from markupsafe import Markup

    return Markup(source)


def text(value: str) -> str:
    """Any string as HTML text or attribute."""
    from markupsafe import escape

    return str(escape(_whole(value)))


def source(name: str, package: str = "gapless.view") -> str:
    """A script or a style sheet, as it is."""
    return files(package).joinpath("scripts" if name.endswith(".js") else "styles", name).read_text("utf-8")


def hash_of(source: str) -> str:
    """As a policy names a script or a style sheet."""
    return b64encode(sha256(source.encode("utf-8")).digest()).decode("ascii")


def policy(style: str, script: str = "", asks: bool = False) -> str:
    """The content security policy: nothing is loaded, and nothing runs but the script, if there is one. `asks` lets it
    ask the server that the page came from, and no other.
    """
    rules = ["default-src 'none'", *(["connect-src 'self'"] if asks else [])]
    rules += [f"script-src 'sha256-{hash_of(script)}'"] if script else []
    rules += [f"style-src 'sha256-{hash_of(style)}'", "base-uri 'none'", "form-action 'none'"]
    return "; ".join(rules + (["require-trusted-types-for 'script'", "trusted-types 'none'"] if script else []))


@cache
def _environment(package: str) -> "Environment":
    from jinja2 import ChoiceLoader, Environment, PackageLoader

    return Environment(
        loader=ChoiceLoader([PackageLoader(each) for each in dict.fromkeys((package, "gapless.view"))]),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        finalize=_whole,
    )


def _whole(value: Any) -> Any:
    """Without lone surrogates, which no file can hold."""
    return value.encode("utf-8", "replace").decode("utf-8") if type(value) is str else value
