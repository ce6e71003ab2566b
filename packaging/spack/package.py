# SPDX-License-Identifier: Apache-2.0
"""Spack's recipe, for Spack 1.0 or later. Copy it into a repository of recipes as packages/moeccl/package.py."""
from spack_repo.builtin.build_systems.meson import MesonPackage

from spack.package import *


class Moeccl(MesonPackage):
    """Collective communication for Mixture-of-Experts training: dispatch and combine with deduplication at every level
    of the cluster, the usual collectives, expert migration and replication, behind a C interface."""

    homepage = "https://a-seed-ba6b85a4.example/moeccl"
    git = "https://a-seed-ba6b85a4.example/moeccl.git"

    license("Apache-2.0", checked_by="moeccl")

    version("main", branch="main")

    variant("mpi", default=False, description="The shim for MPI programs, for the MPI that it is built with")
    variant("cuda", default=False, description="Device kernels: nvcc compiles them, nothing of CUDA is linked")
    variant("python", default=True, description="The Python package")
    variant("perf", default=False, description="The programs that measure")

    depends_on("c", type="build")
    depends_on("cxx", type="build")
    depends_on("meson@1.0:", type="build")
    depends_on("ninja", type="build")
    depends_on("pkgconfig", type="build")
    depends_on("fmt@9:", type="build")
    depends_on("nlohmann-json@3.11:", type="build")
    depends_on("cli11@2:", type="build")
    # Linked as an archive: what loads the library need not have it.
    depends_on("libsodium", type=("build", "link"))
    depends_on("cuda@12.8:", type="build", when="+cuda")
    depends_on("benchmark", type="build", when="+perf")
    # Opened at run time where they are found.
    depends_on("hwloc@2:", type="run")
    depends_on("mpi", when="+mpi")
    extends("python@3.9:", when="+python")
    depends_on("py-pycparser", type="build", when="+python")
    depends_on("py-tomli", type="build", when="+python ^python@:3.10")

    conflicts("%gcc@:11", msg="the library is C++20: GCC 12 or later")
    conflicts("platform=darwin", msg="the library needs Linux: memfd, process_vm_readv, network namespaces")
    requires("target=x86_64:", "target=aarch64:", policy="one_of", msg="the library has code for x86-64 and aarch64")

    def meson_args(self):
        def feature(name):
            return "enabled" if self.spec.satisfies("+" + name) else "disabled"

        args = ["-Dtests=false", "-Dgloo=disabled", f"-Dmpi={feature('mpi')}", f"-Dcuda={feature('cuda')}",
                f"-Dpython={feature('python')}", f"-Dperf={str(self.spec.satisfies('+perf')).lower()}"]
        if self.spec.satisfies("+python"):
            args.append(f"-Dpython_dir={python_platlib}")
        return args

    @run_after("install")
    @on_package_attributes(run_tests=True)
    def check_command(self):
        Executable(join_path(self.prefix.bin, "moeccl"))("plan", "allreduce", "--ranks", "8", "--prove")
