// SPDX-License-Identifier: Apache-2.0
// Loads the tuner as NCCL does: opens the file and looks for the structures, newest version first.
#pragma once

#include <dlfcn.h>

#include <cstdarg>
#include <cstdio>
#include <mutex>
#include <stdexcept>
#include <string>
#include <vector>

#include "plugins/tuner/abi.h"
#include "tests/plugins/nccl_selection.h"

namespace moeccl::testing {

// NCCL has one logger function for all communicators, and its lines end up here.
struct Log {
  static std::vector<std::string> lines() {
    const std::lock_guard lock(mutex());
    return text();
  }
  static void clear() {
    const std::lock_guard lock(mutex());
    text().clear();
  }
  __attribute__((format(printf, 5, 6))) static void write(int level, unsigned long, const char*, int,
                                                          const char* format, ...) {
    char line[4096];
    va_list arguments;
    va_start(arguments, format);
    std::vsnprintf(line, sizeof line, format, arguments);
    va_end(arguments);
    const std::lock_guard lock(mutex());
    text().push_back((level == tuner::kLogWarn ? "WARN " : "INFO ") + std::string(line));
  }

 private:
  static std::mutex& mutex() {
    static std::mutex m;
    return m;
  }
  static std::vector<std::string>& text() {
    static std::vector<std::string> lines;
    return lines;
  }
};

class TunerFile {
 public:
  explicit TunerFile(const char* path) : handle_(dlopen(path, RTLD_NOW | RTLD_LOCAL)) {
    if (handle_ == nullptr) throw std::runtime_error(dlerror());
  }
  ~TunerFile() { dlclose(handle_); }
  TunerFile(const TunerFile&) = delete;
  TunerFile& operator=(const TunerFile&) = delete;
  template <class Plugin>
  Plugin& version(int v) const {
    void* symbol = dlsym(handle_, ("ncclTunerPlugin_v" + std::to_string(v)).c_str());
    if (symbol == nullptr) throw std::runtime_error(dlerror());
    return *static_cast<Plugin*>(symbol);
  }

 private:
  void* handle_;
};

// One communicator's tuner under any version.
class TunerContext {
 public:
  struct Setup {
    int version = 7;
    size_t n_ranks = 16, n_nodes = 2;
    tuner::Logger log = &Log::write;
    tuner::NvlDomains* domains = nullptr;
    tuner::Constants* constants = nullptr;
  };
  TunerContext(const TunerFile& file, const Setup& s) : file_(file), version_(s.version) {
    if (version_ == 3) {
      result_ = file.version<tuner::PluginV3>(3).init(s.n_ranks, s.n_nodes, s.log, &context_);
    } else if (version_ == 4) {
      result_ = file.version<tuner::PluginV4>(4).init(s.n_ranks, s.n_nodes, s.log, &context_);
    } else {
      result_ = file.version<tuner::PluginV5>(version_).init(&context_, 77, s.n_ranks, s.n_nodes, s.log, s.domains,
                                                             s.constants);
    }
  }
  ~TunerContext() {
    if (version_ == 3) (void)file_.version<tuner::PluginV3>(3).destroy(context_);
    if (version_ == 4) (void)file_.version<tuner::PluginV4>(4).destroy(context_);
    if (version_ >= 5) (void)file_.version<tuner::PluginV5>(version_).finalize(context_);
  }
  TunerContext(const TunerContext&) = delete;
  TunerContext& operator=(const TunerContext&) = delete;
  int init_result() const { return result_; }
  void* get() const { return context_; }

  int ask(int function, size_t bytes, float* table, int n_algorithms = 7, int n_protocols = 3, int n_ops = 1) const {
    auto** as_rows = reinterpret_cast<float**>(table);  // as NCCL passes it
    int channels = 12345;
    int result = 0;
    if (version_ == 3) {
      result = file_.version<tuner::PluginV3>(3).get_coll_info(context_, function, bytes, n_ops, as_rows, n_algorithms,
                                                               n_protocols, &channels);
    } else {
      result = file_.version<tuner::PluginV4>(version_ == 4 ? 4 : 5)
                   .get_coll_info(context_, function, bytes, n_ops, as_rows, n_algorithms, n_protocols, 0, &channels);
    }
    return channels == 12345 ? result : -1;
  }
  int ask(int function, size_t bytes, CostTable& table) const { return ask(function, bytes, &table[0][0]); }

 private:
  const TunerFile& file_;
  int version_;
  void* context_ = nullptr;
  int result_ = -1;
};

}  // namespace moeccl::testing
