// What registers torch.ops.fastsim_cpu.*: each source lists its operators once, and registers them.
#pragma once

#include <string>
#include <vector>

#include "tensors.h"

namespace fastsim {

struct Operator {
  std::string schema;
  void (*run)(StableIValue*, uint64_t, uint64_t);  // on torch's stack

  std::string name() const { return schema.substr(0, schema.find('(')); }
  bool has_tensors() const { return schema.find("Tensor") != std::string::npos; }
};

// A function whose arguments the schema describes: "(Tensor x, ...) -> ()".
#define OPERATOR(function, schema) \
  { #function schema, TORCH_BOX(&function) }

// A number that says which operators are registered, and what they take: the sum of the FNV-1a hashes
// of their schemas, whose order is open.
inline uint64_t registered = 0;

inline void count_in(const std::string& schema) {
  uint64_t hash = 0xcbf29ce484222325;
  for (const unsigned char c : schema) hash = (hash ^ c) * 0x100000001b3;
  registered += hash;
}

// Registers the list of operators that a function returns. Those without a tensor have no device.
#define REGISTER_OPERATORS(operators)                                  \
  STABLE_TORCH_LIBRARY_FRAGMENT(fastsim_cpu, m) {                      \
    for (const auto& one : operators()) {                              \
      m.def(one.schema.c_str());                                       \
      fastsim::count_in(one.schema);                                   \
    }                                                                  \
  }                                                                    \
  STABLE_TORCH_LIBRARY_IMPL(fastsim_cpu, CPU, m) {                     \
    for (const auto& one : operators()) {                              \
      if (one.has_tensors()) m.impl(one.name().c_str(), one.run);      \
    }                                                                  \
  }                                                                    \
  STABLE_TORCH_LIBRARY_IMPL(fastsim_cpu, CompositeExplicitAutograd, m) { \
    for (const auto& one : operators()) {                              \
      if (!one.has_tensors()) m.impl(one.name().c_str(), one.run);     \
    }                                                                  \
  }

}  // namespace fastsim
