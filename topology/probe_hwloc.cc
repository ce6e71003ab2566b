// SPDX-License-Identifier: Apache-2.0
#include "src/driver/hwloc.h"
#include "topology/hwloc_xml.h"
#include "topology/probes.h"

namespace moeccl::topology {

Result<Graph> probe_hwloc(const ProbeSources& sources) {
  if (sources.sysfs_root != "/sys")
    return error(moecclUnsupported, "hwloc reads this machine, not a copy of /sys in {}", sources.sysfs_root);
  MOECCL_ASSIGN_OR_RETURN(const driver::HwlocExport made, driver::export_hwloc(sources.hwloc_library));
  return read_hwloc_xml(made.xml, "hwloc " + made.version);
}

}  // namespace moeccl::topology
