# SPDX-License-Identifier: Apache-2.0
"""Joins sources into few files, which together compile in half the time because they instantiate templates once:
`joined.py OUTPUT_DIR NAME SOURCE...` writes OUTPUT_DIR/NAME_0.cc, NAME_1.cc, ..., each of which includes some of the sources, and
prints their paths. Meson calls it when it configures with -Djoined=true (see docs/contributing.md).

Sources of one file share its unnamed namespaces, so two of them that define the same name there, or the same static name or macro, go
into different files. So do two of which one hides a name of a header that the other includes: only the tests' headers are asked, because
those of the library have namespaces of their own. Linux's headers clash with those of the C library, so a source that includes one has a file of its own. If a
name clashes all the same, the compiler says so: rename one of the two."""
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
MOST_BYTES = 96 << 10  # of the sources in one file: the compiler then takes some 20 s and 700 MB on a slow machine


def without_bodies(text):
    """Returns C++ without comments, literals and whatever stands in braces."""
    text = re.sub(r'R"(\w*)\(.*?\)\1"', '""', text, flags=re.S)
    text = re.sub(r'//[^\n]*|/\*.*?\*/', '', text, flags=re.S)
    text = re.sub(r'"(?:\\.|[^"\\\n])*"', '""', text)
    text = re.sub(r"(?<![0-9a-fA-F])'(?:\\.|[^'\\\n])+'", '0', text)
    out, depth = [], 0
    for piece in re.split(r'([{}])', text):
        if piece == '}':
            depth -= 1
        if depth == 0:
            out.append(piece + (';' if piece == '}' else ''))
        if piece == '{':
            depth += 1
    return ''.join(out)


def unnamed_parts(text):
    """Yields what stands in unnamed namespaces, and what is static outside of them."""
    for part in re.finditer(r'^namespace \{\n(.*?)^\}  // namespace$', text, flags=re.S | re.M):
        yield part.group(1)
    for line in re.finditer(r'^static [^;{]*[;{]', text, flags=re.M):
        yield line.group(0)


def declared(part):
    """Returns the names that a part declares outside of braces, and some more: that only keeps sources apart."""
    names = set()
    for values in re.findall(r'\benum\b(?! class)[^{;]*\{([^}]*)\}', part):
        names.update(re.findall(r'\b[a-z]\w*', values))
    for declaration in without_bodies(part).split(';'):
        declaration = re.sub(r'^\s*#[^\n]*', '', declaration, flags=re.M)
        declaration = re.sub(r'^\s*template <[^<>]*(?:<[^<>]*>[^<>]*)*>', '', declaration)
        names.update(re.findall(r'(?<!::)\bk[A-Z]\w*(?=\s*(?:[={(\[,]|$))', declaration))
        found = re.search(r'\b(?:struct|class|union|enum(?: class)?|using) (\w+)', declaration)
        if found:
            names.add(found.group(1))
            continue
        found = re.search(r'([\w~]+|operator\S+)\s*(?:[({=\[]|$)', declaration.strip())
        if found and not re.fullmatch('[A-Z][A-Z_0-9]+', found.group(1)):
            names.add(found.group(1))
    return names


def names_of(text):
    """Returns the names that a source defines for itself."""
    return set(re.findall(r'^#define (\w+)', text, flags=re.M)).union(*map(declared, unnamed_parts(text)))


def test_headers(text, found):
    """Adds the headers of the tests that a text includes to `found`, which has the names of each."""
    for name in re.findall(r'^#include "(tests/[^"]*\.h)"', text, flags=re.M):
        if name not in found and (ROOT / name).exists():
            header = (ROOT / name).read_text()
            found[name] = declared(re.sub(r'^(?:inline )?namespace .*\{$|^\}  // namespace.*$', '', header, flags=re.M))
            test_headers(header, found)
    return found


class Group:
    def __init__(self, alone):
        self.alone, self.sources, self.bytes = alone, [], 0
        self.own, self.headers = set(), set()  # what its sources name themselves, and what their headers do


def groups_of(sources):
    """Returns lists of sources. No name is twice in a list, and none hides one of a header that another source includes."""
    groups = []
    for source in sources:
        text = source.read_text()
        own, headers = names_of(text), set().union(*test_headers(text, {}).values())
        alone = '#include <linux/' in text
        for group in groups:
            fits = not alone and not group.alone and group.bytes + len(text) <= MOST_BYTES
            if fits and not own & (group.own | group.headers) and not headers & group.own:
                break
        else:
            group = Group(alone)
            groups.append(group)
        group.sources.append(source)
        group.bytes += len(text)
        group.own |= own
        group.headers |= headers
    return [group.sources for group in groups]


def main(arguments):
    out, name, *sources = arguments
    out = pathlib.Path(out)
    out.mkdir(parents=True, exist_ok=True)
    for number, group in enumerate(groups_of([pathlib.Path(source).resolve() for source in sources])):
        path = out / f'{name}_{number}.cc'
        text = ''.join(f'#include "{source}"\n' for source in group)
        if not path.exists() or path.read_text() != text:
            path.write_text(text)
        print(path)
    return 0


if __name__ == '__main__':
    sys.exit(main(sys.argv[1:]))
