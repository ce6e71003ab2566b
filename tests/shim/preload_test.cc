// SPDX-License-Identifier: Apache-2.0
// The shim preloaded into programs that do not use NCCL, its output in those that do, and its symbols.
#include <gtest/gtest.h>
#include <sys/wait.h>

#include <array>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <set>
#include <sstream>
#include <string>

namespace moeccl::testing {
namespace {

std::string from_environment(const char* name) {
  const char* value = std::getenv(name);
  return value != nullptr ? value : "";
}
const std::string kShim = from_environment("MOECCL_TEST_SHIM");
const std::string kProgram = from_environment("MOECCL_TEST_PROGRAM");
const std::string kFixture = from_environment("MOECCL_TEST_SYMBOLS");

struct Outcome {
  int status;
  std::string text;  // standard output and error
};

Outcome shell(const std::string& command) {
  FILE* pipe = popen(("exec 2>&1; " + command).c_str(), "r");
  Outcome o{-1, ""};
  if (pipe == nullptr) return o;
  std::array<char, 4096> buffer;
  for (size_t n = 0; (n = fread(buffer.data(), 1, buffer.size(), pipe)) > 0;) o.text.append(buffer.data(), n);
  o.status = pclose(pipe);
  return o;
}

std::string preloaded(const std::string& command) { return "LD_PRELOAD=" + kShim + " " + command; }

size_t occurrences(const std::string& text, const std::string& word) {
  size_t n = 0;
  for (size_t at = text.find(word); at != std::string::npos; at = text.find(word, at + 1)) ++n;
  return n;
}

TEST(ShimPreload, BashNoticesNothing) {
  const std::string script = "bash -c 'echo out; echo err >&2; exit 3'";
  const Outcome with = shell(preloaded(script)), without = shell(script);
  EXPECT_EQ(with.text, without.text);
  EXPECT_EQ(with.text, "out\nerr\n");
  EXPECT_EQ(with.status, without.status);
}

TEST(ShimPreload, PythonHasOneThreadAndNoMoecclInside) {
  const Outcome o = shell(preloaded(R"(python3 -c '
text = open("/proc/self/maps").read()
print("shim" if "libmoeccl-nccl.so" in text else "no shim")
print("core" if "libmoeccl-nccl-core.so" in text or "libmoeccl.so" in text else "no core")
print([l.split()[1] for l in open("/proc/self/status") if l.startswith("Threads")][0])
')"));
  EXPECT_EQ(o.text, "shim\nno core\n1\n");
  EXPECT_EQ(o.status, 0);
}

TEST(ShimPreload, PythonCanUseItByName) {
  // The name is NCCL's. The preloaded shim answers to it, as for programs that open NCCL themselves.
  const Outcome o = shell(preloaded(R"(python3 -c '
import ctypes
nccl = ctypes.CDLL("libnccl.so.2")
v = ctypes.c_int()
print(nccl.ncclGetVersion(ctypes.byref(v)), v.value)
nccl.ncclGetErrorString.restype = ctypes.c_char_p
print(nccl.ncclGetErrorString(0).decode())
')"));
  EXPECT_EQ(o.text, "0 23203\nno error\n");
}

TEST(ShimPreload, TheVersionIsTheUsersChoice) {
  const auto version = [](const std::string& setting) {
    return shell(setting + " " + preloaded(R"(python3 -c '
import ctypes
nccl = ctypes.CDLL("libnccl.so.2")
v = ctypes.c_int()
nccl.ncclGetVersion(ctypes.byref(v))
print(v.value)')"))
        .text;
  };
  EXPECT_EQ(version("MOECCL_SHIM_VERSION=2.28.9"), "22809\n");
  EXPECT_EQ(version("MOECCL_SHIM_VERSION=23007"), "23007\n");
  const std::string refused = version("MOECCL_SHIM_VERSION=new");
  EXPECT_NE(refused.find("MOECCL_SHIM_VERSION=new is not understood"), std::string::npos) << refused;
  EXPECT_NE(refused.find("\n23203\n"), std::string::npos) << refused;
}

TEST(ShimPreload, SaysOnceWhatItTookOver) {
  const Outcome loud = shell(preloaded(kProgram + " 3 2"));
  EXPECT_EQ(loud.status, 0) << loud.text;
  EXPECT_EQ(occurrences(loud.text, "has taken over NCCL"), 1u) << loud.text;
  EXPECT_EQ(occurrences(loud.text, "moeccl-nccl:"), 1u) << loud.text;
  const Outcome quiet = shell("MOECCL_SHIM_QUIET=1 " + preloaded(kProgram + " 3 2"));
  EXPECT_EQ(quiet.status, 0);
  EXPECT_EQ(occurrences(quiet.text, "moeccl-nccl:"), 0u) << quiet.text;
  EXPECT_EQ(quiet.text, "sum 6\nsum 6\n");
}

TEST(ShimPreload, ABadSettingIsNamed) {
  const Outcome o = shell("MOECCL_SHIM_MODE=sometimes " + preloaded(kProgram + " 1 1"));
  EXPECT_EQ(o.status, 0);
  EXPECT_NE(o.text.find("MOECCL_SHIM_MODE=sometimes is not understood"), std::string::npos) << o.text;
}

TEST(ShimPreload, WithoutItsCoreEveryCallFailsAloud) {
  const Outcome o = shell("d=$(mktemp -d); cp " + kShim + " $d; LD_PRELOAD=$d/libmoeccl-nccl.so " + kProgram +
                          " 1 1; r=$?; rm -r $d; exit $r");
  EXPECT_NE(o.status, 0);
  EXPECT_NE(o.text.find("cannot serve NCCL calls"), std::string::npos) << o.text;
}

std::set<std::string> lines(std::istream&& text) {
  std::set<std::string> all;
  for (std::string line; std::getline(text, line);) all.insert(line);
  return all;
}

TEST(ShimSymbols, AreExactlyTheList) {
  const Outcome nm = shell("nm -D --defined-only " + kShim + " | awk '{print $3}'");
  std::set<std::string> exported = lines(std::istringstream(nm.text));
  exported.erase("moecclNcclShim");
  exported.erase("moecclNcclHooksOfShim");
  std::set<std::string> wanted = lines(std::ifstream(kFixture));
  EXPECT_EQ(wanted.size(), 196u);
  EXPECT_EQ(exported, wanted);
}

// The shim has every function that PyTorch calls. The file lists PyTorch's imports from NCCL, with its version.
TEST(ShimSymbols, HoldAllThatPytorchCalls) {
  const Outcome nm = shell("nm -D --defined-only " + kShim + " | awk '{print $3}'");
  const std::set<std::string> exported = lines(std::istringstream(nm.text));
  size_t n = 0;
  for (const std::string& name : lines(std::ifstream(from_environment("MOECCL_TEST_TORCH_SYMBOLS")))) {
    if (name.starts_with('#')) continue;
    ++n;
    EXPECT_TRUE(exported.contains(name)) << name;
  }
  EXPECT_EQ(n, 51u);
}

// Checks nccl.h's functions where it is installed, and all public names that the installed library exports.
TEST(ShimSymbols, CoverTheInstalledHeaderAndLibrary) {
  const std::string include = from_environment("MOECCL_TEST_NCCL_INCLUDE");
  if (include.empty()) GTEST_SKIP() << "no nccl.h is installed";
  const std::set<std::string> listed = lines(std::ifstream(kFixture));
  const Outcome header =
      shell(R"(grep -oE '\bp?nccl[A-Z][A-Za-z0-9]+\(' )" + include + "/nccl.h | tr -d '(' | sort -u");
  const std::set<std::string> declared = lines(std::istringstream(header.text));
  EXPECT_GE(declared.size(), 82u);
  for (const std::string& name : declared) EXPECT_TRUE(listed.contains(name)) << name;
  const Outcome nm =
      shell("nm -D --defined-only " + include +
            R"(/../lib*/libnccl.so.2 2>/dev/null | awk '$2 == "W" {print $3}' | grep '^nccl' | sort -u)");
  for (const std::string& name : lines(std::istringstream(nm.text))) {
    // Names of helpers in the implementation of NCCL's headers, which no header declares.
    EXPECT_TRUE(listed.contains(name)) << name;
  }
}

TEST(ShimAbi, IsTheInstalledHeaders) {
  const std::string real = from_environment("MOECCL_TEST_ABI_REAL");
  if (real.empty()) GTEST_SKIP() << "no nccl.h is installed: sizes are checked against those of 2.28.9 alone";
  const Outcome ours = shell(from_environment("MOECCL_TEST_ABI_OURS")), theirs = shell(real);
  EXPECT_EQ(ours.status, 0);
  EXPECT_EQ(theirs.status, 0);
  // An older header lacks only newer additions.
  const std::set<std::string> known = lines(std::istringstream(ours.text));
  EXPECT_GT(theirs.text.size(), 1000u);
  for (const std::string& line : lines(std::istringstream(theirs.text))) EXPECT_TRUE(known.contains(line)) << line;
}

}  // namespace
}  // namespace moeccl::testing
