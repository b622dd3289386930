// Registers the operators torch.ops.fastsim_cpu.*. Each source file lists its operators once and
// passes the list to REGISTER_OPERATORS.
#pragma once

#include <string>
#include <vector>

#include "tensors.h"

namespace fastsim {

struct Operator {
  std::string schema;
  void (*run)(StableIValue*, uint64_t, uint64_t);  // the boxed function, on torch's stack

  std::string name() const { return schema.substr(0, schema.find('(')); }
  bool has_tensors() const { return schema.find("Tensor") != std::string::npos; }
};

// The Operator of a function and its schema without the name: "(Tensor x, ...) -> ()".
#define OPERATOR(function, schema) \
  { #function schema, TORCH_BOX(&function) }

// A hash of all registered operators and their signatures: the sum of the FNV-1a hashes of their
// schemas. A sum, since the order of registration is not fixed.
inline uint64_t interface_hash = 0;

inline void add_to_interface_hash(const std::string& schema) {
  uint64_t hash = 0xcbf29ce484222325;
  for (const unsigned char c : schema) hash = (hash ^ c) * 0x100000001b3;
  interface_hash += hash;
}

// Registers the operators that the function `operators` returns. An operator without tensor
// arguments is registered for every device.
#define REGISTER_OPERATORS(operators)                                    \
  STABLE_TORCH_LIBRARY_FRAGMENT(fastsim_cpu, m) {                        \
    for (const auto& op : operators()) {                                 \
      m.def(op.schema.c_str());                                          \
      fastsim::add_to_interface_hash(op.schema);                         \
    }                                                                    \
  }                                                                      \
  STABLE_TORCH_LIBRARY_IMPL(fastsim_cpu, CPU, m) {                       \
    for (const auto& op : operators()) {                                 \
      if (op.has_tensors()) m.impl(op.name().c_str(), op.run);           \
    }                                                                    \
  }                                                                      \
  STABLE_TORCH_LIBRARY_IMPL(fastsim_cpu, CompositeExplicitAutograd, m) { \
    for (const auto& op : operators()) {                                 \
      if (!op.has_tensors()) m.impl(op.name().c_str(), op.run);          \
    }                                                                    \
  }

}  // namespace fastsim
