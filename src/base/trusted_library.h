// SPDX-License-Identifier: Apache-2.0
// Libraries that the environment names. Code named by a variable is loaded only if no one but the user and the system's
// administrator could have put it there. This is a header of its own because the library, the shims and the tools share
// only this rule.
#pragma once

#include <sys/auxv.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <climits>
#include <cstdlib>
#include <cstring>
#include <string>

namespace moeccl {

// Returns the variable's value. Like glibc with LD_LIBRARY_PATH, it returns null in a program with more rights than its
// user (setuid, capabilities), because such a user must not choose which code or files the program opens.
inline const char* trusted_variable(const char* name) { return secure_getenv(name); }

// Returns a sentence that says why the library `file` must not be loaded, or an empty string if it may be loaded. On
// success *file becomes its real path.
inline std::string why_not_loaded(std::string* file) {
  if (getauxval(AT_SECURE) != 0) return "this program has more rights than its user, who must not choose what it loads";
  if (file->empty() || (*file)[0] != '/') return "\"" + *file + "\" is not an absolute path; give one";
  char real[PATH_MAX];
  if (realpath(file->c_str(), real) == nullptr) return *file + ": " + std::strerror(errno);
  // Check the file and then each folder above it: a user who may write there can replace the library.
  for (std::string at = real;;) {
    struct stat st = {};
    const bool folder = at != real;
    if (lstat(at.c_str(), &st) != 0) return at + ": " + std::strerror(errno);
    if (!folder && !S_ISREG(st.st_mode)) return at + " is not a regular file";
    if (st.st_uid != 0 && st.st_uid != geteuid())
      return at + " belongs to user " + std::to_string(st.st_uid) + ": its owner must be you or root";
    // In a sticky folder such as /tmp, other users can add files but cannot replace those of their owner.
    const bool sticky = folder && (st.st_mode & S_ISVTX) != 0;
    if ((st.st_mode & S_IWOTH) != 0 && (!sticky || at == std::string(real).substr(0, std::string(real).rfind('/'))))
      return at + " can be written by every user: remove that permission (chmod o-w)";
    if (at == "/") break;
    const size_t slash = at.rfind('/');
    at.resize(slash == 0 ? 1 : slash);
  }
  *file = real;
  return "";
}

}  // namespace moeccl
