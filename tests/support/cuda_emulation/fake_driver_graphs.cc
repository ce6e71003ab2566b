// SPDX-License-Identifier: Apache-2.0
// The emulated driver's captures and graphs. The work of a capturing stream is kept, and put on the stream that the
// graph is launched on, in the order of the capture. What a capture forbids, and to which threads, follows the driver's
// documentation of cuStreamBeginCapture and cuThreadExchangeStreamCaptureMode. A forbidden call also invalidates the
// capture.
#include <algorithm>
#include <utility>

#include "tests/support/cuda_emulation/stream.h"

namespace moeccl::emulation::driver {
namespace {

enum Mode : int { kGlobal = 0, kThreadLocal = 1, kRelaxed = 2 };

// Guards all data of captures.
std::mutex& captures() {
  static auto* const mutex = new std::mutex;
  return *mutex;
}
// The captures that have begun and not ended, including invalid ones.
std::set<std::shared_ptr<Capture>>& active() {
  static auto* const all = new std::set<std::shared_ptr<Capture>>;
  return *all;
}
Handles<Graph>& graphs() {
  static auto* const all = new Handles<Graph>;
  return *all;
}

thread_local int own_mode = kGlobal;
uint64_t this_thread() {
  static std::atomic<uint64_t> last{0};
  static thread_local const uint64_t own = ++last;
  return own;
}

int invalidate(Capture& c, int why) {
  c.invalid = true;
  return why;
}

// The legacy stream would wait for a blocking stream that is being captured.
int implicit(const Stream& stream, bool harmless) {
  if (stream.kind != Stream::Kind::kLegacy) return kOk;
  int rc = kOk;
  for (const auto& c : active()) {
    const bool waited_for = std::any_of(c->members.begin(), c->members.end(),
                                        [&](const auto& m) { return m->context == stream.context && m->blocking(); });
    if (!waited_for) continue;
    rc = kCaptureImplicit;
    if (!harmless) c->invalid = true;
  }
  return rc;
}

std::shared_ptr<Capture> find_capture(uint64_t id) {
  const auto it = std::find_if(active().begin(), active().end(), [&](const auto& c) { return c->id == id; });
  return it == active().end() ? nullptr : *it;
}

// Returns whether everything in the graph comes before the next item of the origin.
bool joined(const Capture& c) {
  std::set<size_t> before;
  std::vector<size_t> next(c.origin->captured_after.begin(), c.origin->captured_after.end());
  while (!next.empty()) {
    const size_t n = next.back();
    next.pop_back();
    if (!before.insert(n).second) continue;
    next.insert(next.end(), c.graph.nodes[n].after.begin(), c.graph.nodes[n].after.end());
  }
  return before.size() == c.graph.nodes.size();
}

void end(const std::shared_ptr<Capture>& c) {
  for (const auto& m : c->members) {
    m->capture = nullptr;
    m->captured_after.clear();
  }
  c->members.clear();
  active().erase(c);
}

}  // namespace

int unsafe_call() {
  const std::lock_guard lock(captures());
  if (own_mode == kRelaxed) return kOk;
  int rc = kOk;
  for (const auto& c : active()) {
    const bool own = c->thread == this_thread();
    if (own ? c->mode == kRelaxed : c->mode != kGlobal || own_mode != kGlobal) continue;
    rc = invalidate(*c, kCaptureUnsupported);
  }
  return rc;
}

bool is_captured(const Stream& stream) {
  const std::lock_guard lock(captures());
  return stream.capture != nullptr;
}

int refuse_captured(const std::shared_ptr<Stream>& stream) {
  const std::lock_guard lock(captures());
  if (const int rc = implicit(*stream, false); rc != kOk) return rc;
  if (stream->capture == nullptr) return kOk;
  if (stream->capture->invalid) return kCaptureInvalidated;
  return invalidate(*stream->capture, kCaptureUnsupported);
}

int refuse_capturing_context(const Context* context) {
  const std::lock_guard lock(captures());
  int rc = kOk;
  for (const auto& c : active()) {
    const bool here =
        std::any_of(c->members.begin(), c->members.end(), [&](const auto& m) { return m->context == context; });
    if (here) rc = invalidate(*c, kCaptureUnsupported);
  }
  return rc;
}

int refuse_captured(const Event& event) {
  const std::lock_guard lock(captures());
  if (event.capture == 0) return kOk;
  if (const auto c = find_capture(event.capture); c != nullptr) c->invalid = true;
  return kCapturedEvent;
}

void refuse_destroyed(const std::shared_ptr<Stream>& stream) {
  const std::lock_guard lock(captures());
  if (stream->capture != nullptr) stream->capture->invalid = true;
}

int capture_item(const std::shared_ptr<Stream>& stream, Item& item, bool* captured) {
  const std::lock_guard lock(captures());
  if (const int rc = implicit(*stream, false); rc != kOk) return rc;
  if (stream->capture == nullptr) return kOk;
  if (stream->capture->invalid) return kCaptureInvalidated;
  *captured = true;
  auto& nodes = stream->capture->graph.nodes;
  nodes.push_back({std::move(item), std::move(stream->captured_after)});
  stream->captured_after = {nodes.size() - 1};
  return kOk;
}

int capture_external(const std::shared_ptr<Stream>& stream,
                     std::function<int(const std::shared_ptr<Stream>&)> external) {
  const std::lock_guard lock(captures());
  if (stream->capture == nullptr) return kInvalidValue;
  if (stream->capture->invalid) return kCaptureInvalidated;
  auto& nodes = stream->capture->graph.nodes;
  nodes.push_back({{}, std::move(stream->captured_after), std::move(external)});
  stream->captured_after = {nodes.size() - 1};
  return kOk;
}

int capture_record(const std::shared_ptr<Stream>& stream, Event& event, bool* captured) {
  const std::lock_guard lock(captures());
  if (const int rc = implicit(*stream, false); rc != kOk) return rc;
  event.capture = 0;
  if (stream->capture == nullptr) return kOk;
  if (stream->capture->invalid) return kCaptureInvalidated;
  *captured = true;
  event.capture = stream->capture->id;
  event.captured_after = stream->captured_after;
  return kOk;
}

int capture_wait(const std::shared_ptr<Stream>& stream, Event& event, bool* captured) {
  const std::lock_guard lock(captures());
  if (const int rc = implicit(*stream, false); rc != kOk) return rc;
  const std::shared_ptr<Capture> own = stream->capture, others = find_capture(event.capture);
  if (own != nullptr && own->invalid) return kCaptureInvalidated;
  if (own == nullptr && event.capture == 0) return kOk;
  *captured = true;
  if (event.capture == 0) {
    // Only the stream's own earlier work may lie outside the graph.
    const std::lock_guard recorded(event.mutex);
    return event.recorded == 0 ? kOk : invalidate(*own, kCaptureIsolation);
  }
  if (others == nullptr) return own == nullptr ? int{kCapturedEvent} : invalidate(*own, kCaptureIsolation);
  if (others->invalid) return kCaptureInvalidated;
  if (own != nullptr && own != others) {
    others->invalid = true;
    return invalidate(*own, kCaptureMerge);
  }
  if (own == nullptr) {
    if (stream->kind == Stream::Kind::kLegacy) return invalidate(*others, kCaptureImplicit);
    stream->capture = others;
    others->members.insert(stream);
    stream->captured_after.clear();
  }
  stream->captured_after.insert(event.captured_after.begin(), event.captured_after.end());
  return kOk;
}

}  // namespace moeccl::emulation::driver

using namespace moeccl::emulation::driver;

EXPORT int cuStreamIsCapturing(void* stream, int* status) {
  MOECCL_IN_CONTEXT(context);
  const std::shared_ptr<Stream> s = stream_of(stream);
  if (s == nullptr) return kInvalidHandle;
  const std::lock_guard lock(captures());
  if (const int rc = implicit(*s, true); rc != kOk) return rc;
  return *status = s->capture == nullptr ? 0 : s->capture->invalid ? 2 : 1, kOk;
}
EXPORT int cuStreamGetCaptureInfo_v2(void* stream, int* status, uint64_t* id, void** graph, const void** dependencies,
                                     size_t* n) {
  MOECCL_CALL();
  if (const int rc = cuStreamIsCapturing(stream, status); rc != kOk) return rc;
  const std::lock_guard lock(captures());
  const std::shared_ptr<Capture> c = stream_of(stream)->capture;
  if (id != nullptr) *id = c == nullptr ? 0 : c->id;
  if (graph != nullptr) *graph = nullptr;
  if (dependencies != nullptr) *dependencies = nullptr;
  if (n != nullptr) *n = 0;
  return kOk;
}
EXPORT int cuStreamBeginCapture_v2(void* stream, int mode) {
  MOECCL_IN_CONTEXT(context);
  const std::shared_ptr<Stream> s = stream_of(stream);
  if (s == nullptr) return kInvalidHandle;
  if (mode < kGlobal || mode > kRelaxed) return kInvalidValue;
  const std::lock_guard lock(captures());
  if (s->kind == Stream::Kind::kLegacy) return kCaptureUnsupported;
  if (s->capture != nullptr) return kIllegalState;
  static uint64_t last = 0;
  auto c = std::make_shared<Capture>();
  c->id = ++last;
  c->mode = mode;
  c->thread = this_thread();
  c->origin = s;
  c->members.insert(s);
  s->captured_after.clear();
  active().insert(c);
  return s->capture = std::move(c), kOk;
}
EXPORT int cuStreamEndCapture(void* stream, void** graph) {
  MOECCL_IN_CONTEXT(context);
  const std::shared_ptr<Stream> s = stream_of(stream);
  if (s == nullptr) return kInvalidHandle;
  *graph = nullptr;
  const std::lock_guard lock(captures());
  const std::shared_ptr<Capture> c = s->capture;
  if (c == nullptr) return kIllegalState;
  if (c->mode != kRelaxed && c->thread != this_thread()) return kCaptureWrongThread;
  if (c->origin != s) return invalidate(*c, kCaptureUnmatched);
  const bool whole = joined(*c);
  end(c);
  if (c->invalid) return kCaptureInvalidated;
  if (!whole) return kCaptureUnjoined;
  return *graph = graphs().add(std::make_shared<Graph>(std::move(c->graph))), kOk;
}
EXPORT int cuThreadExchangeStreamCaptureMode(int* mode) {
  MOECCL_CALL();
  if (*mode < kGlobal || *mode > kRelaxed) return kInvalidValue;
  return std::swap(own_mode, *mode), kOk;
}
EXPORT int cuGraphInstantiateWithFlags(void** instance, void* graph, unsigned long long) {
  MOECCL_IN_CONTEXT(context);
  const std::shared_ptr<Graph> g = graphs().find(graph);
  if (g == nullptr) return kInvalidHandle;
  *instance = graphs().add(std::make_shared<Graph>(*g));
  return kOk;
}
EXPORT int cuGraphUpload(void* instance, void* stream) {
  MOECCL_IN_CONTEXT(context);
  return graphs().find(instance) == nullptr || stream_of(stream) == nullptr ? kInvalidHandle : kOk;
}
EXPORT int cuGraphLaunch(void* instance, void* stream) {
  MOECCL_IN_CONTEXT(context);
  const std::shared_ptr<Graph> g = graphs().find(instance);
  const std::shared_ptr<Stream> s = stream_of(stream);
  if (g == nullptr || s == nullptr) return kInvalidHandle;
  for (const Graph::Node& node : g->nodes) {
    const int rc = node.external != nullptr ? node.external(s) : put(s, node.item);
    if (rc != kOk) return rc;
  }
  return kOk;
}
EXPORT int cuGraphGetNodes(void* graph, void** nodes, size_t* n) {
  MOECCL_CALL();
  const std::shared_ptr<Graph> g = graphs().find(graph);
  if (g == nullptr) return kInvalidHandle;
  for (size_t i = 0; nodes != nullptr && i < std::min(*n, g->nodes.size()); ++i) nodes[i] = &g->nodes[i];
  return *n = g->nodes.size(), kOk;
}
// Tells kernels, which stand for all work here, from waits for events outside of the graph and their records.
EXPORT int cuGraphNodeGetType(void* node, int* type) {
  MOECCL_CALL();
  constexpr int kKernel = 0, kWaitEvent = 6;
  return *type = static_cast<const Graph::Node*>(node)->external != nullptr ? kWaitEvent : kKernel, kOk;
}
EXPORT int cuGraphDestroy(void* graph) {
  MOECCL_CALL();
  return graphs().remove(graph) != nullptr ? kOk : kInvalidHandle;
}
EXPORT int cuGraphExecDestroy(void* instance) {
  MOECCL_CALL();
  return graphs().remove(instance) != nullptr ? kOk : kInvalidHandle;
}
