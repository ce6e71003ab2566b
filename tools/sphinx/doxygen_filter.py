# SPDX-License-Identifier: Apache-2.0
"""Shows Doxygen a public header in the form that it wants: comments before or behind a declaration become its
documentation, and types carry their names in front.

  doxygen_filter.py HEADER"""
import re
import sys

COMMENT = re.compile(r"/\*(.*?)\*/", re.S)


def escaped(text):
    """Returns plain text, in which nothing is a command of Doxygen."""
    text = re.sub(r"(?m)^[ \t]*\*[ \t]?", "", text)
    text = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"([\\@#%\"])", r"\\\1", text).strip()


def convert(source):
    source = re.sub(r"\A.*SPDX-License-Identifier.*\n", "", source)
    first = COMMENT.search(source)
    source = source[:first.start()] + source[first.end():]  # the introduction stands on the page itself

    def document(match):
        line = source[source.rfind("\n", 0, match.start()) + 1:match.start()].strip()
        # The heading of a group of declarations belongs to none of them.
        after = source[match.end():match.end() + 2]
        if not line and after == "\n\n":
            return ""
        return ("/**< " if line else "/** ") + escaped(match[1]) + " */"

    text = COMMENT.sub(document, source)
    text = re.sub(r"#ifdef __cplusplus\n(?:#define MOECCL_INT : int\n#else\n#define MOECCL_INT\n|.*?)#endif\n", "", text, flags=re.S)
    text = text.replace("MOECCL_API ", "").replace(" MOECCL_INT", "")
    text = re.sub(r"#if defined\(__GNUC__\).*?#endif\n", "", text, flags=re.S)
    # typedef struct { ... } name; -> struct name { ... };
    return re.sub(r"typedef (struct|enum) (?:\w+ )?\{(.*?)\n\} (\w+);", r"\1 \3 {\2\n};", text, flags=re.S)


if __name__ == "__main__":
    with open(sys.argv[1], encoding="utf-8") as file:
        sys.stdout.write("/** \\file */\n" + convert(file.read()))
