# SPDX-License-Identifier: Apache-2.0
"""Compares the C interface with its last approved state, tests/abi/libmoeccl.abi, by abidiff (package abigail-tools).

  interface.py --library build/libmoeccl.so     prints what a compiled program would notice; exits with 1 if there is anything
  interface.py --write                          approves the present headers, and adds new functions to Debian's symbols file

The library is built without debugging information, so its types are read from a model: a library with the same functions, headers and
version script, in which each function ends the program. The compiler has checked the real functions against these headers.
The library itself must export the model's symbols, each under the same version."""
import argparse
import os
import re
import subprocess
import sys
import tempfile

HERE = os.path.dirname(os.path.realpath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))
REFERENCE = os.path.join(HERE, "libmoeccl.abi")
# Debian's list: the version of the library in which each symbol appeared.
SYMBOLS = os.path.join(ROOT, "packaging/debian/libmoeccl0.symbols")
# docs/contributing.md allows structs with a size to grow at their end. (abidiff counts added functions and enumerators
# as no change.)
GROWTH = """[suppress_type]
  label = structs grow at their end
  type_kind = struct
  has_data_member_inserted_at = end
"""


def run(*command, **options):
    return subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, "LC_ALL": "C"}, **options)


def must(*command):
    done = run(*command)
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")
    return done.stdout


def prototypes(include):
    """Yields the declarations of MOECCL_API functions, in the order of the headers."""
    folder = os.path.join(include, "moeccl")
    for name in sorted(os.listdir(folder)):
        if name.endswith(".h"):
            with open(os.path.join(folder, name), encoding="utf-8") as text:
                bare = re.sub(r"/\*.*?\*/", "", text.read(), flags=re.S)
            yield from (" ".join(p.split()) for p in re.findall(r"^MOECCL_API\s+([^;{}]+\))\s*;", bare, flags=re.M))


def soname(version_h):
    with open(version_h, encoding="utf-8") as text:
        return "libmoeccl.so." + re.search(r"VERSION_MAJOR (\d+)", text.read())[1]


def model(include, place, version_script=os.path.join(ROOT, "src/api/moeccl.map")):
    """Builds the model of these headers in a folder, and returns its path."""
    source = os.path.join(place, "model.c")
    with open(source, "w", encoding="utf-8") as text:
        text.write("#include <moeccl/moeccl.h>\n" + "".join(f"{p} {{ __builtin_trap(); }}\n" for p in prototypes(include)))
    name = soname(os.path.join(include, "moeccl/version.h"))
    library = os.path.join(place, name)
    must(os.environ.get("CC", "cc").split()[-1], "-std=c11", "-g", "-O0", "-fPIC", "-shared", "-I", include, source, "-o", library,
         f"-Wl,-soname,{name}", f"-Wl,--version-script={version_script}")
    return library


def write_reference(library, path):
    text = must("abidw", "--no-corpus-path", "--no-comp-dir-path", "--no-show-locs", library)
    with open(path, "w", encoding="utf-8") as out:
        out.write(text)


def symbols(library):
    """Returns {name: version} of the defined dynamic symbols."""
    found = {}
    for line in must("readelf", "--dyn-syms", "-W", library).splitlines():
        words = line.split()
        if len(words) >= 8 and words[0].rstrip(":").isdigit() and words[4] in ("GLOBAL", "WEAK") and words[6] not in ("UND", "ABS"):
            name, _, version = words[7].replace("@@", "@").partition("@")
            found[name] = version
    return found


def debian_symbols(built, version, path=SYMBOLS):
    """Returns the text of Debian's symbols file. Old symbols keep their version and new ones get this version.
    Lost symbols stay, so that their absence is noticed."""
    since = {}
    if os.path.exists(path):
        with open(path, encoding="utf-8") as text:
            since = dict(line.split()[:2] for line in text if line.startswith(" "))
    for name, node in symbols(built).items():
        since.setdefault(f"{name}@{node}", version)
    for node in {name.partition("@")[2] for name in since}:
        since.setdefault(f"{node}@{node}", version)
    soname = os.path.basename(built)
    return (f"{soname} {soname.replace('.so.', '')} #MINVER#\n* Build-Depends-Package: libmoeccl-dev\n"
            + "".join(f" {name} {since[name]}\n" for name in sorted(since)))


def differences(include, library=None, reference=REFERENCE, version_script=os.path.join(ROOT, "src/api/moeccl.map")):
    """Yields sentences on what a program that was compiled against the reference would notice."""
    with tempfile.TemporaryDirectory() as place:
        suppressions = os.path.join(place, "growth.ini")
        with open(suppressions, "w", encoding="utf-8") as text:
            text.write(GROWTH)
        built = model(include, place, version_script)
        done = run("abidiff", "--suppressions", suppressions, "--no-added-syms", reference, built)
        if done.returncode & 3:
            sys.exit(f"abidiff failed:\n{done.stdout}{done.stderr}")
        if done.returncode:
            yield done.stdout.strip()
        if library is not None:
            real = symbols(library)
            for name, version in symbols(built).items():
                if real.get(name) != version:
                    yield f"{library}: {name} is {'not exported' if name not in real else 'of version ' + (real[name] or 'none')}, the headers and src/api/moeccl.map say {version}"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library", help="a built libmoeccl.so, whose symbols are compared too")
    parser.add_argument("--write", action="store_true", help="make the present headers the reference")
    args = parser.parse_args()
    include = os.path.join(ROOT, "include")
    if args.write:
        with tempfile.TemporaryDirectory() as place:
            built = model(include, place)
            write_reference(built, REFERENCE)
            text = debian_symbols(built, must(os.path.join(ROOT, "tools/version")).strip())
        with open(SYMBOLS, "w", encoding="utf-8") as out:
            out.write(text)
        return 0
    found = list(differences(include, args.library))
    for sentence in found:
        print(sentence)
    if found:
        print("Programs that exist would notice. When nobody has them yet: python3 tests/abi/interface.py --write")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
