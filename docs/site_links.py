"""Links of the site to files of the repository that are no pages.

`[results](../benchmarks/results/x.md)` works in the repository and on GitHub. On the site there is no such page, and MyST would
warn. Here such a link becomes a download of the file as it is. A link to README.md leads to the first page. A file that is not
there stays a warning, and the build fails.
"""

import os
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.addnodes import download_reference, pending_xref
from sphinx.transforms import SphinxTransform


class FilesOutside(SphinxTransform):
    default_priority = 5  # before references are resolved

    def apply(self, **options: Any) -> None:
        docs = Path(self.app.srcdir).resolve()
        for node in list(self.document.findall(pending_xref)):
            if node.get("reftype") == "myst":
                self._replace(node, docs)

    def _replace(self, node: pending_xref, docs: Path) -> None:
        target = node["reftarget"].split("#")[0]
        if node.get("refdomain") == "doc":  # MyST has made a page's path of it, without ".md"
            target = f"{target}.md"
        file = ((docs / self.env.docname).parent / target).resolve()
        if file == docs.parent / "README.md":
            node["refdomain"], node["reftarget"], node["refexplicit"] = "doc", "index", True
        elif not file.is_relative_to(docs) and file.is_dir():
            node.replace_self(nodes.inline("", "", *node.children))
        elif not file.is_relative_to(docs) and file.exists():
            relative = os.path.relpath(file, (docs / self.env.docname).parent)
            node.replace_self(download_reference("", "", *node.children, reftarget=relative, refdoc=self.env.docname))


def setup(app: Any) -> dict[str, Any]:
    app.add_transform(FilesOutside)
    return {"parallel_read_safe": True}
