// Operations' names as profiles and explanations have them. Apart from the printer, so that parsers need no planner.
#pragma once

#include "moeccl/plan.h"

namespace moeccl::plan {

const char* op_text(moecclOp_t op);  // "AllReduce"; "unknown operation" beyond the last

}  // namespace moeccl::plan
