// SPDX-License-Identifier: Apache-2.0
#include "src/driver/hwloc.h"

#include <cerrno>
#include <cstring>

#include "src/driver/dynamic_library.h"

namespace moeccl::driver {

namespace {

struct Topology;
constexpr int kKeepAll = 0;              // HWLOC_TYPE_FILTER_KEEP_ALL
constexpr unsigned long kBlacklist = 1;  // HWLOC_TOPOLOGY_COMPONENTS_FLAG_BLACKLIST

struct Functions {
  unsigned (*api_version)();
  int (*init)(Topology**);
  int (*io_filter)(Topology*, int);
  int (*components)(Topology*, unsigned long, const char*);
  int (*load)(Topology*);
  int (*export_xml)(Topology*, char**, int*, unsigned long);
  void (*free_xml)(Topology*, char*);
  void (*destroy)(Topology*);

  Status resolve(const DynamicLibrary& l) {
    l.maybe("hwloc_topology_set_components", &components);
    return l.resolve("hwloc_get_api_version", &api_version, "hwloc_topology_init", &init,
                     "hwloc_topology_set_io_types_filter", &io_filter, "hwloc_topology_load", &load,
                     "hwloc_topology_export_xmlbuffer", &export_xml, "hwloc_free_xmlbuffer", &free_xml,
                     "hwloc_topology_destroy", &destroy);
  }
};

}  // namespace

Result<HwlocExport> export_hwloc(const std::string& library) {
  MOECCL_ASSIGN_OR_RETURN(DynamicLibrary opened, DynamicLibrary::open(library, {"libhwloc.so.15", "libhwloc.so"}));
  Functions f = {};
  const Status loaded = f.resolve(opened);
  if (library.empty()) opened.keep();  // because its plugins stay loaded
  MOECCL_TRY(loaded);
  const unsigned version = f.api_version();
  if (version < 0x20000)
    return error(moecclUnsupported, "{} is version {:#x}: hwloc 2.0 or newer is needed", opened.name(), version);
  Topology* topology = nullptr;
  if (f.init(&topology) != 0) return error(moecclSystemError, "hwloc_topology_init: {}", std::strerror(errno));
  (void)f.io_filter(topology, kKeepAll);
  if (f.components != nullptr)
    for (const char* name : {"opencl", "cuda", "nvml", "rsmi", "levelzero", "gl"})
      (void)f.components(topology, kBlacklist, name);
  HwlocExport result;
  result.version = format("{}.{}.{}", version >> 16, version >> 8 & 0xff, version & 0xff);
  char* xml = nullptr;
  int bytes = 0;
  Status status;
  if (f.load(topology) != 0) {
    status = error(moecclSystemError, "hwloc_topology_load: {}", std::strerror(errno));
  } else if (f.export_xml(topology, &xml, &bytes, 0) != 0 || xml == nullptr) {
    status = error(moecclSystemError, "hwloc_topology_export_xmlbuffer: {}", std::strerror(errno));
  } else {
    result.xml = xml;  // zero-terminated
    f.free_xml(topology, xml);
  }
  f.destroy(topology);
  if (!status.ok()) return status;
  return result;
}

}  // namespace moeccl::driver
