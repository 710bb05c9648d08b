// Detect objects in a JPEG photo with an exported model.xml. Needs OpenVINO and libjpeg.
//
//   pip install openvino
//   vil export output/mine --format openvino
//   ov=$(python -c "import openvino, pathlib; print(pathlib.Path(openvino.__file__).parent)")
//   g++ -std=c++17 -O2 -I$ov/include examples/cpp/detect.cpp -o detect -ljpeg -Wl,-rpath,$ov/libs $ov/libs/libopenvino.so.*
//   ./detect output/mine/export/model.xml photo.jpg 0.5
//
// Each line of the output is a detection: class, score, left, top, right and bottom in pixels of the photo, separated
// by tabs. The photo must be upright, because libjpeg does not apply an EXIF orientation.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iostream>
#include <jpeglib.h>
#include <map>
#include <openvino/openvino.hpp>
#include <regex>
#include <stdexcept>
#include <string>
#include <vector>

struct Image {
    int height = 0, width = 0;
    std::vector<std::uint8_t> pixels;  // height x width x RGB
};

Image read_jpeg(const std::string& path) {
    FILE* file = std::fopen(path.c_str(), "rb");
    if (!file) throw std::runtime_error("Cannot open '" + path + "'.");
    jpeg_decompress_struct jpeg;
    jpeg_error_mgr errors;
    jpeg.err = jpeg_std_error(&errors);
    errors.error_exit = [](j_common_ptr info) {
        char message[JMSG_LENGTH_MAX];
        info->err->format_message(info, message);
        throw std::runtime_error(std::string("Cannot read the photo: ") + message + ".");
    };
    jpeg_create_decompress(&jpeg);
    jpeg_stdio_src(&jpeg, file);
    jpeg_read_header(&jpeg, TRUE);
    jpeg.out_color_space = JCS_RGB;
    jpeg_start_decompress(&jpeg);
    Image image{int(jpeg.output_height), int(jpeg.output_width), {}};
    image.pixels.resize(std::size_t(image.height) * image.width * 3);
    while (jpeg.output_scanline < jpeg.output_height) {
        JSAMPROW row = image.pixels.data() + std::size_t(jpeg.output_scanline) * image.width * 3;
        jpeg_read_scanlines(&jpeg, &row, 1);
    }
    jpeg_finish_decompress(&jpeg);
    jpeg_destroy_decompress(&jpeg);
    std::fclose(file);
    return image;
}

using Pixels = std::vector<std::uint8_t>;

// Resize one axis of (outer, length, inner) to (outer, resized, inner), exactly as Pillow's BILINEAR: a triangle filter
// that becomes wider if the image becomes smaller, with weights in units of 2^-22.
Pixels resize(const Pixels& input, int outer, int length, int inner, int resized) {
    Pixels output(std::size_t(outer) * resized * inner);
    const double scale = double(length) / resized, reach = std::max(scale, 1.0);
    for (int to = 0; to < resized; ++to) {
        const double center = (to + 0.5) * scale;
        const int first = std::max(0, int(center - reach + 0.5)), last = std::min(length, int(center + reach + 0.5));
        std::vector<double> weights;
        double sum = 0;
        for (int from = first; from < last; ++from) {
            weights.push_back(std::max(0.0, 1 - std::abs((from + 0.5 - center) / reach)));
            sum += weights.back();
        }
        std::vector<std::int64_t> units;
        for (const double weight : weights) units.push_back(std::int64_t(0.5 + weight / sum * (1 << 22)));
        for (int i = 0; i < outer; ++i)
            for (int k = 0; k < inner; ++k) {
                std::int64_t value = 1 << 21;
                for (int from = first; from < last; ++from)
                    value += units[from - first] * input[(std::size_t(i) * length + from) * inner + k];
                value = std::min<std::int64_t>(value >> 22, 255);
                output[(std::size_t(i) * resized + to) * inner + k] = std::uint8_t(value);
            }
    }
    return output;
}

int run(const std::string& model_path, const std::string& photo_path, const std::string& lowest) {
    char* end = nullptr;
    const float threshold = std::strtof(lowest.c_str(), &end);
    if (lowest.empty() || *end) throw std::runtime_error("The threshold '" + lowest + "' is not a number.");
    if (!std::ifstream(model_path)) throw std::runtime_error("Cannot open '" + model_path + "'.");
    ov::Core core;
    auto model = core.read_model(model_path);
    auto info = [&](const std::string& key) {
        if (!model->has_rt_info("model_info", key))
            throw std::runtime_error("'" + model_path + "' has no " + key + ". Export it again with vil export.");
        return model->get_rt_info<std::string>("model_info", key);
    };
    const auto shape = model->input().get_partial_shape();
    if (shape.size() != 3 || shape[1].is_static() || model->input().get_element_type() != ov::element::u8)
        throw std::runtime_error("Export '" + model_path + "' for single uint8 images of any size.");

    Image photo = read_jpeg(photo_path);
    int height = photo.height, width = photo.width;
    if (const double side = std::stod(info("short_side"))) {  // 0: images are not resized
        double scale = side / std::min(height, width);
        const double longest = std::stod(info("longest_side"));
        if (longest > 0) scale = std::min(scale, longest / std::max(height, width));
        height = int(height * scale + 0.5);
        width = int(width * scale + 0.5);
    }
    auto pixels = resize(photo.pixels, photo.height, photo.width, 3, width);
    pixels = resize(pixels, 1, photo.height, width * 3, height);

    ov::Tensor input(ov::element::u8, {3, std::size_t(height), std::size_t(width)});
    const bool reverse = info("color_order") == "BGR";
    const std::size_t area = std::size_t(height) * width;
    for (std::size_t channel = 0; channel < 3; ++channel)
        for (std::size_t i = 0; i < area; ++i)
            input.data<std::uint8_t>()[channel * area + i] = pixels[i * 3 + (reverse ? 2 - channel : channel)];

    // By default OpenVINO computes in bfloat16 on processors that support it.
    auto compiled = core.compile_model(model, "CPU", ov::hint::inference_precision(ov::element::f32));
    auto request = compiled.create_infer_request();
    request.set_input_tensor(input);
    request.infer();

    std::map<std::int64_t, std::string> names;
    const std::string listed = info("names");  // {0: 'cat', 1: 'dog'}
    const std::regex entry(R"re((\d+): (?:'([^']*)'|"([^"]*)"))re");
    for (std::sregex_iterator match(listed.begin(), listed.end(), entry), end; match != end; ++match)
        names[std::stoi((*match)[1])] = (*match)[2].matched ? (*match)[2] : (*match)[3];
    const auto boxes = request.get_tensor("boxes"), scores = request.get_tensor("scores");
    const auto classes = request.get_tensor("classes");
    const double factors[] = {double(photo.width) / width, double(photo.height) / height};
    bool is_empty = true;
    for (std::size_t i = 0; i < scores.get_size(); ++i) {
        if (scores.data<float>()[i] < threshold) continue;
        is_empty = false;
        std::cout << names[classes.data<std::int64_t>()[i]] << '\t' << scores.data<float>()[i];
        for (std::size_t edge = 0; edge < 4; ++edge)
            std::cout << '\t' << boxes.data<float>()[4 * i + edge] * factors[edge % 2];
        std::cout << '\n';
    }
    if (is_empty) std::cerr << "no object with a score of " << threshold << " or more\n";
    return 0;
}

int main(int argc, char** argv) {
    if (argc < 3) {
        std::cerr << "usage: detect model.xml photo.jpg [threshold]\n";
        return 2;
    }
    try {
        return run(argv[1], argv[2], argc > 3 ? argv[3] : "0.3");
    } catch (const std::exception& error) {
        std::cerr << "error: " << error.what() << '\n';
        return 1;
    }
}
