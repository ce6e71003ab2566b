/* SPDX-License-Identifier: Apache-2.0 */
/* How a library that programs preload, which needs only libc, reaches the library behind it. Define _GNU_SOURCE before
 * the first header (dladdr). */
#ifndef MOECCL_SHIM_BESIDE_H_
#define MOECCL_SHIM_BESIDE_H_

#include <dlfcn.h>
#include <libgen.h>
#include <stdio.h>
#include <stdlib.h>

/* Loads the library `name` from the folder of the calling library's own file, whatever symbolic link led there, and
 * returns a symbol of it. `own` is an address in the calling library. Returns NULL with the reason in `why`. */
static inline void* symbol_beside(const void* own, const char* name, const char* symbol, char* why, size_t why_bytes) {
  Dl_info self;
  char* file = dladdr(own, &self) != 0 && self.dli_fname != NULL ? realpath(self.dli_fname, NULL) : NULL;
  char path[4096];
  const int bytes = file == NULL ? -1 : snprintf(path, sizeof path, "%s/%s", dirname(file), name);
  free(file);
  if (bytes < 0 || bytes >= (int)sizeof path) {
    snprintf(why, why_bytes, "the path of the shim's own file cannot be resolved");
    return NULL;
  }
  void* library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  void* found = library == NULL ? NULL : dlsym(library, symbol);
  if (found == NULL) {
    const char* said = dlerror();
    snprintf(why, why_bytes, "%s", said != NULL ? said : path);
  }
  return found;
}

#endif /* MOECCL_SHIM_BESIDE_H_ */
