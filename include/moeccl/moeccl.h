/* SPDX-License-Identifier: Apache-2.0 */
/* MoECCL: collective communication for Mixture-of-Experts training. This header includes all the others. */
#ifndef MOECCL_MOECCL_H_
#define MOECCL_MOECCL_H_

#include <moeccl/codec.h>
#include <moeccl/collectives.h>
#include <moeccl/comm.h>
#include <moeccl/elastic.h>
#include <moeccl/experts.h>
#include <moeccl/gradient.h>
#include <moeccl/hybrid.h>
#include <moeccl/migrate.h>
#include <moeccl/moe.h>
#include <moeccl/pipeline.h>
#include <moeccl/plan.h>
#include <moeccl/profile.h>
#include <moeccl/replace.h>
#include <moeccl/simulate.h>
#include <moeccl/solve.h>
#include <moeccl/status.h>
#include <moeccl/swap.h>
#include <moeccl/topology.h>
#include <moeccl/types.h>
#include <moeccl/version.h>

#endif /* MOECCL_MOECCL_H_ */
