// SPDX-License-Identifier: Apache-2.0
// One net plugin with the meaning of the newest version, whatever version it implements. Function pointers are read
// after init, because some plugins export only a name and init, and fill in the rest there.
//
// Calls may come from any thread, but calls about one comm and its requests from only one at a time. No call waits,
// unless the plugin breaks its interface. Every failure is one sentence: plugin, version, call, result and what to do.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "src/base/status.h"
#include "transport/netplugin/abi.h"

namespace moeccl::transport::netplugin {

struct DeviceProperties {
  std::string name;
  int ptr_support = 0;     // abi::kPtr*
  int64_t mbit_per_s = 0;  // 0: not reported
  int max_comms = 0;
  int device_type = abi::kDeviceHost;
  size_t max_bytes = 0;  // of one transfer
};

using Handle = std::array<std::byte, abi::kHandleBytes>;
// What a plugin hands out; null: none.
using Comm = void*;
using Memory = void*;  // a registration; null is valid
using Request = void*;

class NetApi {
 public:
  virtual ~NetApi() = default;
  NetApi(const NetApi&) = delete;
  NetApi& operator=(const NetApi&) = delete;

  const std::string& name() const { return name_; }        // the plugin's own: "FastSocket"
  const std::string& library() const { return library_; }  // the file
  int version() const { return version_; }
  std::string text() const;  // "FastSocket (libnccl-net.so, v6)"
  // Ignores case. A plugin that renames itself in init goes by both names.
  bool is_called(const std::string& name) const;
  // The most requests of a comm that may be under way at once.
  int max_requests() const { return version_ == 6 ? 8 : 32; }

  // Begins a communicator's use of the plugin. Up to v10 there are no contexts: the first init counts, and lasts as
  // long as the process. In all versions an init that fails is the last one.
  virtual Result<void*> init(uint64_t comm_id) = 0;
  virtual Status finalize(void* context) = 0;
  // Called after init, and before all calls below but devices(): checks that the plugin has every call that a transport
  // makes; Unsupported names the first that is missing. A plugin without devices may lack them.
  virtual Status complete() const = 0;
  virtual Result<int> devices() = 0;
  virtual Result<DeviceProperties> properties(int dev) = 0;
  virtual Result<Comm> listen(void* context, int dev, Handle* handle) = 0;
  // Null: call again, with the same handle at the same address.
  virtual Result<Comm> connect(void* context, int dev, Handle* handle) = 0;
  virtual Result<Comm> accept(Comm listener) = 0;
  virtual Result<Memory> register_memory(Comm comm, void* data, size_t bytes, int type) = 0;
  virtual Status deregister(Comm comm, Memory memory) = 0;
  // Null: not now, call again.
  virtual Result<Request> send(Comm comm, void* data, size_t bytes, Memory memory) = 0;
  virtual Result<Request> receive(Comm comm, void* data, size_t bytes, Memory memory) = 0;
  virtual Result<Request> flush(Comm comm, void* data, size_t bytes, Memory memory) = 0;
  // *bytes: the size of a completed receive, where the plugin reports it; else 0.
  virtual Result<bool> test(Request request, size_t* bytes) = 0;
  virtual Status close_send(Comm comm) = 0;
  virtual Status close_receive(Comm comm) = 0;
  virtual Status close_listen(Comm comm) = 0;

 protected:
  NetApi(int version, std::string library, std::string name)
      : version_(version), library_(std::move(library)), exported_name_(name), name_(std::move(name)) {}
  // missing() is the error for a call that the plugin lacks, failed() for one that returned an error.
  Status missing(const char* call) const;
  Status failed(const char* call, abi::Code code) const;

  int version_;
  std::string library_, exported_name_, name_;
};

// Wraps the structure behind the symbol ncclNetPlugin_v<version>, which must stay where it is. Others may write to it.
std::unique_ptr<NetApi> adapt(int version, const void* structure, std::string library);

// The logger that plugins are given; also keeps this thread's last warning for failed(). Warnings are INFO lines unless
// MOECCL_NET asks for a plugin, or note_in_use() was called.
void note_in_use();
void plugin_log(int level, unsigned long flags, const char* file, int line, const char* text, ...);

}  // namespace moeccl::transport::netplugin
