// Registers the CPU kernels as torch.ops.fastsim_cpu.*: stable ABI, every output given by the
// caller, rows shared out over torch's threads. fastsim/backends/cpu.py is the only caller.

#include <string>

#include "arguments.h"
#include "passes.h"

namespace fastsim {

namespace {

void unit_rows(Tensor x, Tensor unit, Tensor inverse) {
  with_type(unit, [&](auto type) {
    using T = decltype(type);
    make_unit_rows(matrix(x), x.size(0), x.size(1), output<T>(unit), output<T>(inverse));
  });
}

void unit_rows_backward(Tensor grad_unit, Tensor x, Tensor inverse, double factor, Tensor grad,
                        Tensor dots) {
  with_type(grad_unit, [&](auto type) {
    using T = decltype(type);
    STD_TORCH_CHECK(grad.is_contiguous(), "fastsim: a contiguous tensor");
    through_unit_rows(input<T>(grad_unit), matrix(x), x.size(0), x.size(1), input<T>(inverse),
                      T(factor), grad.mutable_data_ptr(), dtype_of(grad), output<T>(dots));
  });
}

// ---- products ----

int64_t panel_columns(bool single) {
  return single ? packed_rows<float>(1) : packed_rows<double>(1);
}

void pack_panels(Tensor y, Tensor packed) {
  with_type(y, [&](auto type) {
    using T = decltype(type);
    pack(input<T>(y), y.size(0), y.size(1), output<T>(packed));
  });
}

void scores(Tensor x, Tensor packed, Tensor panel) {
  with_type(x, [&](auto type) {
    using T = decltype(type);
    Block<T> b{};
    take_panel(panel, b);
    fill_scores(input<T>(x), x.size(1), static_cast<const T*>(packed.const_data_ptr()), b);
  });
}

void multiply(Tensor panel, Tensor right, Tensor out, bool transposed, bool add) {
  with_type(right, [&](auto type) {
    using T = decltype(type);
    Block<T> b{};
    take_panel(panel, b);
    multiply_panel(b, input<T>(right), right.size(1), output<T>(out), transposed, add);
  });
}

// ---- panel operators ----

void leave_out_above(Tensor panel, Tensor guide, Tensor thresholds) {
  with_type(panel, [&](auto type) {
    using T = decltype(type);
    Block<T> b{}, g{};
    take_panel(panel, b);
    take_panel(guide, g);
    STD_TORCH_CHECK(guide.scalar_type() == panel.scalar_type(), "fastsim: panels of one dtype");
    const T* threshold = input<T>(thresholds);
    over(b.rows, b.columns, [&](int64_t begin, int64_t end) {
      kernels().of<T>().leave_out_above(b, g.scores, g.stride, threshold, begin, end);
    });
  });
}

void observe(PAIRS, Tensor seen) {
  with_type(panel, [&](auto type) {
    using T = decltype(type);
    observe_block(BLOCK, output<double>(seen));
  });
}

template <class T>
SoftmaxState<T> softmax_state(const Tensor& max, const Tensor& sum, const Tensor& logits,
                              const Tensor& sums) {
  return {{output<double>(max), output<double>(sum)},
          output<double>(logits),
          output<double>(sums)};
}

void softmax_fused(PAIRS, double scale, double margin, bool normalise, Tensor weights, Tensor max,
                   Tensor sum, Tensor target_logits, Tensor target_sums) {
  with_type(panel, [&](auto type) {
    using T = decltype(type);
    const Block<T> b = BLOCK;
    const auto state = softmax_state<T>(max, sum, target_logits, target_sums);
    const T* w = input<T>(weights);
    over(b.rows, b.columns, [&](int64_t begin, int64_t end) {
      kernels().of<T>().softmax_fused(b, T(scale), T(margin), normalise, w, state, begin, end);
    });
  });
}

void softmax_forward(PAIRS, double scale, double margin, Tensor max, Tensor sum,
                  Tensor target_logits, Tensor target_sums, Optional column_max,
                  Optional column_sum) {
  with_type(panel, [&](auto type) {
    using T = decltype(type);
    const Block<T> b = BLOCK;
    const auto state = softmax_state<T>(max, sum, target_logits, target_sums);
    over(b.rows, b.columns, [&](int64_t begin, int64_t end) {
      kernels().of<T>().softmax_forward_rows(b, T(scale), T(margin), state, begin, end);
    });
    if (!column_max) return;
    const MaxSum columns{output<double>(*column_max), output<double>(*column_sum)};
    over(b.columns, b.rows, [&](int64_t begin, int64_t end) {
      kernels().of<T>().softmax_forward_columns(b, T(scale), columns, begin, end);
    });
  });
}

void softmax_score_grad(PAIRS, double scale, double margin, Tensor row_top, Tensor row_weight,
                   Tensor target_weight, Optional column_top, Optional column_weight) {
  with_type(panel, [&](auto type) {
    using T = decltype(type);
    const Block<T> b = BLOCK;
    const SoftmaxScoreGrad<T> score_grad{input<T>(row_top), input<T>(row_weight), input<T>(target_weight),
                                input<T>(column_top), input<T>(column_weight)};
    over(b.rows, b.columns, [&](int64_t begin, int64_t end) {
      kernels().of<T>().softmax_score_grad(b, T(scale), T(margin), score_grad, begin, end);
    });
  });
}

void sigmoid(PAIRS, double scale, double bias, Optional weights, Tensor losses,
             Tensor score_grad_sums) {
  with_type(panel, [&](auto type) {
    using T = decltype(type);
    const Block<T> b = BLOCK;
    const T* w = input<T>(weights);
    double *loss = output<double>(losses), *score_grads = output<double>(score_grad_sums);
    over(b.rows, b.columns, [&](int64_t begin, int64_t end) {
      kernels().of<T>().sigmoid(b, T(scale), T(bias), w, loss, score_grads, begin, end);
    });
  });
}

void squared_error(PAIRS, Optional weights, Tensor losses) {
  with_type(panel, [&](auto type) {
    using T = decltype(type);
    const Block<T> b = BLOCK;
    const T* w = input<T>(weights);
    double* loss = output<double>(losses);
    over(b.rows, b.columns, [&](int64_t begin, int64_t end) {
      kernels().of<T>().squared_error(b, w, loss, begin, end);
    });
  });
}

MaxSum max_sum(const Tensor& max, const Tensor& sum) {
  return {output<double>(max), output<double>(sum)};
}

void multi_similarity_forward(PAIRS, double scale, double positive_scale, Tensor negative_max,
                           Tensor negative_sum, Tensor positive_max, Tensor positive_sum) {
  with_type(panel, [&](auto type) {
    using T = decltype(type);
    const Block<T> b = BLOCK;
    const MaxSum negatives = max_sum(negative_max, negative_sum);
    const MaxSum positives = max_sum(positive_max, positive_sum);
    over(b.rows, b.columns, [&](int64_t begin, int64_t end) {
      kernels().of<T>().multi_similarity_forward(b, T(scale), T(positive_scale), negatives, positives,
                                              begin, end);
    });
  });
}

void multi_similarity_score_grad(PAIRS, double scale, double positive_scale, Tensor negative_top,
                            Tensor negative_weight, Tensor positive_top, Tensor positive_weight) {
  with_type(panel, [&](auto type) {
    using T = decltype(type);
    const Block<T> b = BLOCK;
    const ContrastScoreGrad<T> score_grad{input<T>(negative_top), input<T>(negative_weight),
                                 input<T>(positive_top), input<T>(positive_weight)};
    over(b.rows, b.columns, [&](int64_t begin, int64_t end) {
      kernels().of<T>().multi_similarity_score_grad(b, T(scale), T(positive_scale), score_grad, begin, end);
    });
  });
}

void multi_positive_forward(PAIRS, double scale, bool known, Tensor negative_max,
                         Tensor negative_sum, Tensor losses, Tensor score_grads) {
  with_type(panel, [&](auto type) {
    using T = decltype(type);
    const Block<T> b = BLOCK;
    const MaxSum negatives = max_sum(negative_max, negative_sum);
    const PositiveSums sums{output<double>(losses), output<double>(score_grads)};
    over(b.rows, b.columns, [&](int64_t begin, int64_t end) {
      kernels().of<T>().multi_positive_forward(b, T(scale), known, negatives, sums, begin, end);
    });
  });
}

void multi_positive_score_grad(PAIRS, double scale, Tensor negative_top, Tensor negative_weight,
                          Tensor log_sum, Tensor positive_weight) {
  with_type(panel, [&](auto type) {
    using T = decltype(type);
    const Block<T> b = BLOCK;
    const PositiveScoreGrad<T> score_grad{input<T>(negative_top), input<T>(negative_weight),
                                 input<T>(log_sum), input<T>(positive_weight)};
    over(b.rows, b.columns, [&](int64_t begin, int64_t end) {
      kernels().of<T>().multi_positive_score_grad(b, T(scale), score_grad, begin, end);
    });
  });
}

void circle_forward(PAIRS, double scale, double margin, Tensor negative_max, Tensor negative_sum,
                    Tensor positive_max, Tensor positive_sum) {
  with_type(panel, [&](auto type) {
    using T = decltype(type);
    const Block<T> b = BLOCK;
    const MaxSum negatives = max_sum(negative_max, negative_sum);
    const MaxSum positives = max_sum(positive_max, positive_sum);
    over(b.rows, b.columns, [&](int64_t begin, int64_t end) {
      kernels().of<T>().circle_forward(b, T(scale), T(margin), negatives, positives, begin, end);
    });
  });
}

void circle_score_grad(PAIRS, double scale, double margin, Tensor negative_top,
                       Tensor negative_weight, Tensor positive_top, Tensor positive_weight) {
  with_type(panel, [&](auto type) {
    using T = decltype(type);
    const Block<T> b = BLOCK;
    const ContrastScoreGrad<T> score_grad{input<T>(negative_top), input<T>(negative_weight),
                                          input<T>(positive_top), input<T>(positive_weight)};
    over(b.rows, b.columns, [&](int64_t begin, int64_t end) {
      kernels().of<T>().circle_score_grad(b, T(scale), T(margin), score_grad, begin, end);
    });
  });
}

void levels_forward(PAIRS, double scale, Tensor values, Tensor partial) {
  with_type(panel, [&](auto type) {
    using T = decltype(type);
    const Block<T> b = BLOCK;
    const T* level = input<T>(values);
    STD_TORCH_CHECK(values.numel() <= kMostLevels, "fastsim: at most ", kMostLevels, " levels");
    double* out = output<double>(partial);
    over(b.rows, b.columns, [&](int64_t begin, int64_t end) {
      kernels().of<T>().levels_forward(b, T(scale), level, values.numel(), out, begin, end);
    });
  });
}

void levels_score_grad(PAIRS, double scale, Tensor values, Tensor high, Tensor up, Tensor low,
                  Tensor down) {
  with_type(panel, [&](auto type) {
    using T = decltype(type);
    const Block<T> b = BLOCK;
    const LevelScoreGrad<T> score_grad{input<T>(values), input<T>(high), input<T>(up), input<T>(low),
                              input<T>(down), values.numel()};
    over(b.rows, b.columns, [&](int64_t begin, int64_t end) {
      kernels().of<T>().levels_score_grad(b, T(scale), score_grad, begin, end);
    });
  });
}

void closest(PAIRS, bool semi_hard, Tensor ceilings, Tensor values, Tensor indices) {
  with_type(panel, [&](auto type) {
    using T = decltype(type);
    const Block<T> b = BLOCK;
    const T* ceiling = input<T>(ceilings);
    T* value = output<T>(values);
    int64_t* index = output<int64_t>(indices);
    over(b.rows, b.columns, [&](int64_t begin, int64_t end) {
      kernels().of<T>().closest(b, semi_hard, ceiling, value, index, begin, end);
    });
  });
}

void hardest(PAIRS, Optional offsets, Tensor low, Tensor low_index, Tensor high,
             Tensor high_index) {
  with_type(panel, [&](auto type) {
    using T = decltype(type);
    const Block<T> b = BLOCK;
    const T* taken = input<T>(offsets);
    const Extreme<T> lowest{output<T>(low), output<int64_t>(low_index)};
    const Extreme<T> highest{output<T>(high), output<int64_t>(high_index)};
    over(b.rows, b.columns, [&](int64_t begin, int64_t end) {
      kernels().of<T>().hardest(b, taken, lowest, highest, begin, end);
    });
  });
}

void top_k(Tensor panel, int64_t column0, Tensor values, Tensor indices) {
  with_type(panel, [&](auto type) {
    using T = decltype(type);
    Block<T> b{};
    take_panel(panel, b);
    b.column0 = column0;
    T* value = output<T>(values);
    int64_t* index = output<int64_t>(indices);
    over(b.rows, b.columns, [&](int64_t begin, int64_t end) {
      kernels().of<T>().top_k(b, values.size(1), value, index, begin, end);
    });
  });
}

std::string instruction_set() { return kernels().name; }

}  // namespace
}  // namespace fastsim

STABLE_TORCH_LIBRARY(fastsim_cpu, m) {
  m.def("unit_rows(Tensor x, Tensor(unit!) unit, Tensor(inverse!) inverse) -> ()");
  m.def("unit_rows_backward(Tensor grad_unit, Tensor x, Tensor inverse, float factor, "
        "Tensor(grad!) grad, Tensor(dots!) dots) -> ()");
  m.def("paired_cosines(Tensor x, Tensor y, Tensor(cosines!) cosines, Tensor(inverse!) inverse) "
        "-> ()");
  m.def("paired_cosines_backward(Tensor grad, Tensor x, Tensor y, Tensor cosines, "
        "Tensor inverse, Tensor(grad_x!)? grad_x, Tensor(grad_y!)? grad_y) -> ()");
  m.def("centred(Tensor x, Tensor? y, Tensor(rows!) rows, Tensor(columns!)? columns, "
        "Tensor(offsets!) offsets, Tensor(largest!) largest) -> ()");
  m.def("chosen_rows(Tensor x, Tensor? y, Tensor columns, bool distances, "
        "Tensor(values!) values) -> ()");
  m.def("chosen_rows_backward(Tensor grad, Tensor? values, Tensor x, Tensor? y, Tensor columns, "
        "Tensor(grad_x!)? grad_x, Tensor(grad_y!)? grad_y) -> ()");
  m.def("panel_columns(bool single) -> int");
  m.def("pack_panels(Tensor y, Tensor(packed!) packed) -> ()");
  m.def("scores(Tensor x, Tensor packed, Tensor(panel!) panel) -> ()");
  m.def("multiply(Tensor panel, Tensor right, Tensor(out!) out, bool transposed, bool add) -> ()");
  m.def("leave_out_above(Tensor(panel!) panel, Tensor guide, Tensor thresholds) -> ()");
  m.def("observe" PAIRS_SCHEMA "Tensor(seen!) seen) -> ()");
  m.def("softmax_fused" PAIRS_SCHEMA
        "float scale, float margin, bool normalise, Tensor weights, Tensor(max!) max, "
        "Tensor(sum!) sum, Tensor(logits!) target_logits, Tensor(sums!) target_sums) -> ()");
  m.def("softmax_forward" PAIRS_SCHEMA
        "float scale, float margin, Tensor(max!) max, Tensor(sum!) sum, "
        "Tensor(logits!) target_logits, Tensor(sums!) target_sums, "
        "Tensor(column_max!)? column_max, Tensor(column_sum!)? column_sum) -> ()");
  m.def("softmax_score_grad" PAIRS_SCHEMA
        "float scale, float margin, Tensor row_top, Tensor row_weight, Tensor target_weight, "
        "Tensor? column_top, Tensor? column_weight) -> ()");
  m.def("sigmoid" PAIRS_SCHEMA
        "float scale, float bias, Tensor? weights, Tensor(losses!) losses, "
        "Tensor(score_grad_sums!) score_grad_sums) -> ()");
  m.def("squared_error" PAIRS_SCHEMA "Tensor? weights, Tensor(losses!) losses) -> ()");
  m.def("multi_similarity_forward" PAIRS_SCHEMA
        "float scale, float positive_scale, Tensor(negative_max!) negative_max, "
        "Tensor(negative_sum!) negative_sum, Tensor(positive_max!) positive_max, "
        "Tensor(positive_sum!) positive_sum) -> ()");
  m.def("multi_similarity_score_grad" PAIRS_SCHEMA
        "float scale, float positive_scale, Tensor negative_top, Tensor negative_weight, "
        "Tensor positive_top, Tensor positive_weight) -> ()");
  m.def("multi_positive_forward" PAIRS_SCHEMA
        "float scale, bool known, Tensor(negative_max!) negative_max, "
        "Tensor(negative_sum!) negative_sum, Tensor(losses!) losses, Tensor(score_grads!) score_grads) -> ()");
  m.def("multi_positive_score_grad" PAIRS_SCHEMA
        "float scale, Tensor negative_top, Tensor negative_weight, Tensor log_sum, "
        "Tensor positive_weight) -> ()");
  m.def("circle_forward" PAIRS_SCHEMA
        "float scale, float margin, Tensor(negative_max!) negative_max, "
        "Tensor(negative_sum!) negative_sum, Tensor(positive_max!) positive_max, "
        "Tensor(positive_sum!) positive_sum) -> ()");
  m.def("circle_score_grad" PAIRS_SCHEMA
        "float scale, float margin, Tensor negative_top, Tensor negative_weight, "
        "Tensor positive_top, Tensor positive_weight) -> ()");
  m.def("levels_forward" PAIRS_SCHEMA
        "float scale, Tensor values, Tensor(partial!) partial) -> ()");
  m.def("levels_score_grad" PAIRS_SCHEMA
        "float scale, Tensor values, Tensor high, Tensor up, Tensor low, Tensor down) -> ()");
  m.def("closest" PAIRS_SCHEMA
        "bool semi_hard, Tensor ceilings, Tensor(values!) values, "
        "Tensor(indices!) indices) -> ()");
  m.def("hardest" PAIRS_SCHEMA
        "Tensor? offsets, Tensor(low!) low, Tensor(low_index!) low_index, Tensor(high!) high, "
        "Tensor(high_index!) high_index) -> ()");
  m.def("top_k(Tensor(panel!) panel, int column0, Tensor(values!) values, "
        "Tensor(indices!) indices) -> ()");
  m.def("cosent(Tensor scores, Tensor labels, float scale, Tensor(loss!) loss, "
        "Tensor(score_grad!)? score_grad) -> ()");
  m.def("whole(Tensor x, Tensor? y, Tensor? positives, Tensor? row_ids, Tensor? column_ids, "
        "Tensor? row_groups, Tensor? column_groups, Tensor? dense, float negative_target, int skip, "
        "int kind, float scale, float bias, float margin, bool normalise, bool symmetric, "
        "Tensor weights, Tensor(grad_x!)? grad_x, Tensor(grad_y!)? grad_y, "
        "Tensor(total!) total, Tensor(parameters!) parameters, Tensor(seen!)? seen) -> ()");
  m.def("instruction_set() -> str");
}

STABLE_TORCH_LIBRARY_IMPL(fastsim_cpu, CPU, m) {
  m.impl("unit_rows", TORCH_BOX(&fastsim::unit_rows));
  m.impl("unit_rows_backward", TORCH_BOX(&fastsim::unit_rows_backward));
  m.impl("paired_cosines", TORCH_BOX(&fastsim::paired_cosines));
  m.impl("paired_cosines_backward", TORCH_BOX(&fastsim::paired_cosines_backward));
  m.impl("centred", TORCH_BOX(&fastsim::centred));
  m.impl("chosen_rows", TORCH_BOX(&fastsim::chosen_rows));
  m.impl("chosen_rows_backward", TORCH_BOX(&fastsim::chosen_rows_backward));
  m.impl("pack_panels", TORCH_BOX(&fastsim::pack_panels));
  m.impl("scores", TORCH_BOX(&fastsim::scores));
  m.impl("multiply", TORCH_BOX(&fastsim::multiply));
  m.impl("leave_out_above", TORCH_BOX(&fastsim::leave_out_above));
  m.impl("observe", TORCH_BOX(&fastsim::observe));
  m.impl("softmax_fused", TORCH_BOX(&fastsim::softmax_fused));
  m.impl("softmax_forward", TORCH_BOX(&fastsim::softmax_forward));
  m.impl("softmax_score_grad", TORCH_BOX(&fastsim::softmax_score_grad));
  m.impl("sigmoid", TORCH_BOX(&fastsim::sigmoid));
  m.impl("squared_error", TORCH_BOX(&fastsim::squared_error));
  m.impl("multi_similarity_forward", TORCH_BOX(&fastsim::multi_similarity_forward));
  m.impl("multi_similarity_score_grad", TORCH_BOX(&fastsim::multi_similarity_score_grad));
  m.impl("multi_positive_forward", TORCH_BOX(&fastsim::multi_positive_forward));
  m.impl("multi_positive_score_grad", TORCH_BOX(&fastsim::multi_positive_score_grad));
  m.impl("circle_forward", TORCH_BOX(&fastsim::circle_forward));
  m.impl("circle_score_grad", TORCH_BOX(&fastsim::circle_score_grad));
  m.impl("levels_forward", TORCH_BOX(&fastsim::levels_forward));
  m.impl("levels_score_grad", TORCH_BOX(&fastsim::levels_score_grad));
  m.impl("closest", TORCH_BOX(&fastsim::closest));
  m.impl("hardest", TORCH_BOX(&fastsim::hardest));
  m.impl("top_k", TORCH_BOX(&fastsim::top_k));
  m.impl("cosent", TORCH_BOX(&fastsim::cosent));
  m.impl("whole", TORCH_BOX(&fastsim::whole));
}

STABLE_TORCH_LIBRARY_IMPL(fastsim_cpu, CompositeExplicitAutograd, m) {
  m.impl("panel_columns", TORCH_BOX(&fastsim::panel_columns));
  m.impl("instruction_set", TORCH_BOX(&fastsim::instruction_set));
}
