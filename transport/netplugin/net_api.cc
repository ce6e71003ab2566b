// SPDX-License-Identifier: Apache-2.0
#include "transport/netplugin/net_api.h"

#include <strings.h>
#include <algorithm>
#include <atomic>

#include <climits>
#include <concepts>
#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <mutex>
#include <optional>
#include <type_traits>
#include <utility>

#include "src/base/log.h"
#include "src/base/plugin_log.h"

namespace moeccl::transport::netplugin {
namespace {

using abi::Code;

// The calling thread's last warning, until failed() has reported it. A plain array leaves nothing to free when a thread
// ends.
thread_local char last_warning[256];
std::atomic<bool> in_use{false};  // by any communicator of the process

const char* meaning(Code code) {
  switch (code) {
    case 1:
      return "unhandled CUDA error";
    case 2:
      return "system error";
    case 3:
      return "internal error";
    case 4:
      return "invalid argument";
    case 5:
      return "invalid usage";
    case 6:
      return "remote error";
    case 7:
      return "in progress";
    default:
      return "no result that NCCL knows";
  }
}

Code no_profiler(void**, int, void*, int64_t, void*) { return abi::kSuccess; }

// The largest transfer of a plugin that reports none, because its version cannot or it leaves the value at 0.
constexpr size_t kOldMaxBytes = size_t{1} << 30;

template <class Net>
class Adapter final : public NetApi {
  // What a version has, by the members of its structure; see abi.h.
  static constexpr bool kContexts = requires(Net n) { n.finalize; };
  static constexpr bool kProfiler = kContexts || std::same_as<Net, abi::NetV10>;
  static constexpr bool kWide = kProfiler || std::same_as<Net, abi::NetV9>;
  static constexpr bool kDeviceComms = !std::same_as<Net, abi::NetV6>;

 public:
  Adapter(int version, const Net* net, std::string library)
      : NetApi(version, std::move(library), net->name == nullptr ? "unnamed" : net->name), exported_(net) {}

  Result<void*> init(uint64_t comm_id) override {
    const std::lock_guard lock(mutex_);
    void* context = nullptr;
    // Like NCCL, which does not try a plugin again whose init has failed.
    if (initialised_.has_value() && (!kContexts || !initialised_->ok())) {
      MOECCL_TRY(*initialised_);
      return context;
    }
    if (exported_->init == nullptr) {
      initialised_ = missing("init");
    } else {
      Code code = abi::kSuccess;
      if constexpr (kContexts) {
        abi::CommConfig config{abi::kUndefined};
        code = exported_->init(&context, comm_id, &config, plugin_log, no_profiler);
      } else if constexpr (kProfiler) {
        code = exported_->init(plugin_log, no_profiler);
      } else {
        code = exported_->init(plugin_log);
      }
      initialised_ = code == abi::kSuccess ? Status() : failed("init", code);
    }
    MOECCL_TRY(*initialised_);
    // Only now, because init may have written the pointers; only once, because other communicators already use them.
    if (!read_) {
      std::memcpy(static_cast<void*>(&net_), exported_, sizeof(net_));
      if (net_.name != nullptr) name_ = net_.name;
      read_ = true;
    }
    return context;
  }

  Status finalize(void* context) override {
    if constexpr (kContexts) {
      if (net_.finalize == nullptr) return {};
      const std::lock_guard lock(mutex_);  // as NCCL, which lets no other init or finalize run meanwhile
      const Code code = net_.finalize(context);
      if (code != abi::kSuccess) return failed("finalize", code);
    }
    return {};
  }

  Status complete() const override {
    const std::pair<const char*, bool> calls[] = {{"getProperties", net_.getProperties != nullptr},
                                                  {"listen", net_.listen != nullptr},
                                                  {"connect", net_.connect != nullptr},
                                                  {"accept", net_.accept != nullptr},
                                                  {"regMr", net_.regMr != nullptr},
                                                  {"isend", net_.isend != nullptr},
                                                  {"irecv", net_.irecv != nullptr},
                                                  {"test", net_.test != nullptr},
                                                  {"closeSend", net_.closeSend != nullptr},
                                                  {"closeRecv", net_.closeRecv != nullptr},
                                                  {"closeListen", net_.closeListen != nullptr}};
    for (const auto& [call, there] : calls) {
      if (!there) return missing(call);
    }
    return {};
  }

  Result<int> devices() override {
    if (net_.devices == nullptr) return missing("devices");
    int n = 0;
    const Code code = net_.devices(&n);
    if (code != abi::kSuccess) return failed("devices", code);
    return n < 0 ? 0 : n;
  }

  Result<DeviceProperties> properties(int dev) override {
    std::remove_pointer_t<PropertiesArgument<decltype(net_.getProperties)>> p = {};
    const Code code = net_.getProperties(dev, &p);
    if (code != abi::kSuccess) return failed("getProperties", code);
    DeviceProperties out;
    out.name = p.name == nullptr ? format("device {}", dev) : p.name;
    out.ptr_support = p.ptrSupport;
    out.mbit_per_s = p.speed > 0 ? p.speed : 0;
    out.max_comms = p.maxComms;
    out.max_bytes = kOldMaxBytes;
    if constexpr (requires { p.netDeviceType; }) out.device_type = p.netDeviceType;
    if constexpr (requires { p.maxP2pBytes; }) {
      if (p.maxP2pBytes > 0) out.max_bytes = p.maxP2pBytes;
    }
    return out;
  }

  Result<Comm> listen(void* context, int dev, Handle* handle) override {
    Comm comm = nullptr;
    Code code = abi::kSuccess;
    if constexpr (kContexts) {
      code = net_.listen(context, dev, handle->data(), &comm);
    } else {
      code = net_.listen(dev, handle->data(), &comm);
    }
    if (code != abi::kSuccess) return failed("listen", code);
    if (comm == nullptr) return failed("listen, which gave no comm", code);
    return comm;
  }

  Result<Comm> connect(void* context, int dev, Handle* handle) override {
    Comm comm = nullptr;
    void* offload = nullptr;  // no device drives transfers here
    Code code = abi::kSuccess;
    if constexpr (kContexts) {
      code = net_.connect(context, dev, handle->data(), &comm, &offload);
    } else if constexpr (kProfiler) {
      abi::CommConfig config{abi::kUndefined};
      code = net_.connect(dev, &config, handle->data(), &comm, &offload);
    } else if constexpr (kDeviceComms) {
      code = net_.connect(dev, handle->data(), &comm, &offload);
    } else {
      code = net_.connect(dev, handle->data(), &comm);
    }
    if (code != abi::kSuccess) return failed("connect", code);
    return comm;
  }

  Result<Comm> accept(Comm listener) override {
    Comm comm = nullptr;
    void* offload = nullptr;
    Code code = abi::kSuccess;
    if constexpr (kDeviceComms) {
      code = net_.accept(listener, &comm, &offload);
    } else {
      code = net_.accept(listener, &comm);
    }
    if (code != abi::kSuccess) return failed("accept", code);
    return comm;
  }

  Result<Memory> register_memory(Comm comm, void* data, size_t bytes, int type) override {
    Memory memory = nullptr;
    Code code = abi::kSuccess;
    if constexpr (std::same_as<decltype(net_.regMr), abi::TypesV6::RegMr*>) {
      if (bytes > INT_MAX) {
        return error(moecclUnsupported, "net plugin {}: regMr of {} bytes: this version takes at most 2 GiB", text(),
                     bytes);
      }
      code = net_.regMr(comm, data, static_cast<int>(bytes), type, &memory);
    } else {
      code = net_.regMr(comm, data, bytes, type, &memory);
    }
    if (code != abi::kSuccess) return failed("regMr", code);
    return memory;
  }

  Status deregister(Comm comm, Memory memory) override {
    if (net_.deregMr == nullptr || memory == nullptr) return {};  // a link that fails to open has registered only some
    const Code code = net_.deregMr(comm, memory);
    return code == abi::kSuccess ? Status() : failed("deregMr", code);
  }

  Result<Request> send(Comm comm, void* data, size_t bytes, Memory memory) override {
    Request request = nullptr;
    Code code = abi::kSuccess;
    if constexpr (kProfiler) {
      code = net_.isend(comm, data, bytes, 0, memory, nullptr, &request);
    } else if constexpr (kWide) {
      code = net_.isend(comm, data, bytes, 0, memory, &request);
    } else {
      code = net_.isend(comm, data, static_cast<int>(bytes), 0, memory, &request);
    }
    if (code != abi::kSuccess) return failed("isend", code);
    return request;
  }

  Result<Request> receive(Comm comm, void* data, size_t bytes, Memory memory) override {
    Request request = nullptr;
    int tag = 0;
    Code code = abi::kSuccess;
    if constexpr (kProfiler) {
      void* parent = nullptr;
      code = net_.irecv(comm, 1, &data, &bytes, &tag, &memory, &parent, &request);
    } else if constexpr (kWide) {
      code = net_.irecv(comm, 1, &data, &bytes, &tag, &memory, &request);
    } else {
      int size = static_cast<int>(bytes);
      code = net_.irecv(comm, 1, &data, &size, &tag, &memory, &request);
    }
    if (code != abi::kSuccess) return failed("irecv", code);
    return request;
  }

  Result<Request> flush(Comm comm, void* data, size_t bytes, Memory memory) override {
    if (net_.iflush == nullptr) return missing("iflush");
    Request request = nullptr;
    int size = static_cast<int>(std::min<size_t>(bytes, INT_MAX));
    const Code code = net_.iflush(comm, 1, &data, &size, &memory, &request);
    if (code != abi::kSuccess) return failed("iflush", code);
    return request;
  }

  Result<bool> test(Request request, size_t* bytes) override {
    int done = 0, size = 0;
    const Code code = net_.test(request, &done, &size);
    if (code != abi::kSuccess) return failed("test", code);
    *bytes = size > 0 ? static_cast<size_t>(size) : 0;
    return done != 0;
  }

  Status close_send(Comm comm) override { return close(net_.closeSend, comm, "closeSend"); }
  Status close_receive(Comm comm) override { return close(net_.closeRecv, comm, "closeRecv"); }
  Status close_listen(Comm comm) override { return close(net_.closeListen, comm, "closeListen"); }

 private:
  template <class F>
  struct ArgumentOf;
  template <class P>
  struct ArgumentOf<Code (*)(int, P)> {
    using Type = P;
  };
  template <class F>
  using PropertiesArgument = typename ArgumentOf<F>::Type;

  Status close(abi::Close* function, Comm comm, const char* call) {
    if (function == nullptr || comm == nullptr) return {};
    const Code code = function(comm);
    return code == abi::kSuccess ? Status() : failed(call, code);
  }

  const Net* exported_;
  Net net_ = {};
  std::mutex mutex_;  // for init and finalize
  bool read_ = false;
  std::optional<Status> initialised_;
};

template <class Net>
std::unique_ptr<NetApi> make(int version, const void* structure, std::string library) {
  return std::make_unique<Adapter<Net>>(version, static_cast<const Net*>(structure), std::move(library));
}

}  // namespace

std::string NetApi::text() const { return format("{} ({}, v{})", name_, library_, version_); }

bool NetApi::is_called(const std::string& name) const {
  return strcasecmp(name_.c_str(), name.c_str()) == 0 || strcasecmp(exported_name_.c_str(), name.c_str()) == 0;
}

Status NetApi::missing(const char* call) const {
  return error(moecclUnsupported,
               "net plugin {} has no {}: it is not made for this use; MOECCL_NET=tcp does without it", text(), call);
}

Status NetApi::failed(const char* call, abi::Code code) const {
  std::string said;
  if (last_warning[0] != 0) said = format(" (it says: {})", last_warning);
  last_warning[0] = 0;
  return error(code == abi::kSystemError || code == 6 ? moecclRemoteError : moecclSystemError,
               "net plugin {}: {} returned {}, {}{}: see its log with MOECCL_DEBUG=INFO, or use MOECCL_NET=tcp", text(),
               call, code, meaning(code), said);
}

std::unique_ptr<NetApi> adapt(int version, const void* structure, std::string library) {
  switch (version) {
    case 6:
      return make<abi::NetV6>(version, structure, std::move(library));
    case 7:
      return make<abi::NetV7>(version, structure, std::move(library));
    case 8:
      return make<abi::NetV8>(version, structure, std::move(library));
    case 9:
      return make<abi::NetV9>(version, structure, std::move(library));
    case 10:
      return make<abi::NetV10>(version, structure, std::move(library));
    case 11:
      return make<abi::NetV11>(version, structure, std::move(library));
    case 12:
      return make<abi::NetV12>(version, structure, std::move(library));
    default:
      return nullptr;
  }
}

void note_in_use() { in_use.store(true, std::memory_order_relaxed); }

void plugin_log(int level, unsigned long, const char*, int, const char* text, ...) {
  // A user who has not asked for a plugin need not read why one that was found does not work here.
  const bool counts = in_use.load(std::memory_order_relaxed) || env().net.starts_with("plugin");
  const LogLevel told = level_of_plugin(level);
  const bool is_warning = told == LogLevel::kWarn;
  const LogLevel ours = is_warning && !counts ? LogLevel::kInfo : told;
  if (!is_warning && !log_enabled(ours)) return;
  va_list arguments;
  va_start(arguments, text);
  const std::optional<std::string> line = line_of_plugin(text, arguments);
  va_end(arguments);
  if (!line) return;
  if (is_warning) std::snprintf(last_warning, sizeof(last_warning), "%.255s", line->c_str());
  log(ours, "net plugin: {}", *line);
}

}  // namespace moeccl::transport::netplugin
