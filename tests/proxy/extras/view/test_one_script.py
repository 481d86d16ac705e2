"""The page's modules as one script; that it runs is tested with the report, in a browser."""

from __future__ import annotations

import pytest

from proxy.extras.view.one_script import one_script
from proxy.extras.view.pages import file_text


def test_modules_become_functions_in_the_order_of_their_imports() -> None:
    modules = {
        "main.js": 'import { a as b, c } from "./lib/one.js";\nimport two from "./two.js";\nb(c);',
        "lib/one.js": 'import {c} from"../three.js";export { c };\nexport function a() {}',
        "two.js": "export default (x) => x;",
        "three.js": 'export * from "./two.js";\nvar n=1;export{n as c};',
    }
    script = one_script("main.js", modules.__getitem__)
    assert script == '"use strict";\n' + "\n".join(
        [
            "const module_0 = (() => {\nconst default_export = (x) => x;",
            "return { default: default_export };\n})();",
            "const module_1 = (() => {\n\nvar n=1;",
            "return { ...module_0, c: n };\n})();",
            "const module_2 = (() => {\nconst {c} = module_1;\nfunction a() {}",
            "return { c: c, a: a };\n})();",
            "const module_3 = (() => {\nconst { a: b, c } = module_2;",
            "const two = module_0.default;\nb(c);",
            "return {  };\n})();",
        ]
    )


@pytest.mark.parametrize(
    ("modules", "message"),
    [
        ({"a.js": 'import * as b from "./b.js";'}, "not a form of import or export"),
        ({"a.js": "export let a = 1;"}, "not a form of import or export"),
        (
            {"a.js": 'import b from "./b.js";', "b.js": 'import a from "./a.js";'},
            "a.js → b",
        ),
        ({"a.js": "'</SCRIPT>'"}, "has the text </script or <!--"),
    ],
)
def test_what_would_not_run_is_refused(modules: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        one_script("a.js", modules.__getitem__)


@pytest.mark.parametrize("entry", ["report.js", "app.js"])
def test_the_pages_own_modules_can_be_joined(entry: str) -> None:
    assert one_script(entry, file_text).count("const module_") > 10
