// llama.cpp by node-llama-cpp: answers token ids on a pipe. See llama_cpp.py, which starts it.
//
//     node llama_cpp.mjs MODULES GGUF THREADS SEQUENCES CONTEXT LOOKUP
//
// A line of input is {"prompts": [[id]], "max_tokens": n}. All prompts are decoded together,
// greedily, and a line of output is {"outputs": [[id]], "first": [seconds], "last": [seconds]}.

import {createRequire} from "node:module";
import {createInterface} from "node:readline";
import {pathToFileURL} from "node:url";

const [modules, modelPath, threads, sequences, contextSize, lookup] = process.argv.slice(2);
const library = createRequire(`${modules}/`).resolve("node-llama-cpp");
const {getLlama, InputLookupTokenPredictor} = await import(pathToFileURL(library));

const llama = await getLlama({
    gpu: false, build: "never", logLevel: "error", maxThreads: Number(threads),
});
const model = await llama.loadModel({modelPath});
const context = await model.createContext({
    threads: Number(threads), sequences: Number(sequences),
    contextSize: Number(contextSize), batchSize: Number(contextSize),
});

async function decode(prompt, maxTokens, start) {
    const tokenPredictor = lookup === "1" ? new InputLookupTokenPredictor() : undefined;
    const sequence = context.getSequence({tokenPredictor});
    const output = [];
    let first = 0;
    const options = {temperature: 0, yieldEogToken: true};
    for await (const token of sequence.evaluate(prompt, options)) {
        first ||= (performance.now() - start) / 1000;
        output.push(token);
        if (output.length >= maxTokens || model.isEogToken(token))
            break;
    }
    const last = (performance.now() - start) / 1000;
    sequence.dispose();
    return {output, first, last};
}

console.log("ready");
for await (const line of createInterface({input: process.stdin})) {
    const {prompts, max_tokens} = JSON.parse(line);
    const start = performance.now();
    const results = await Promise.all(
        prompts.map((prompt) => decode(prompt, max_tokens, start)));
    console.log(JSON.stringify({
        outputs: results.map((result) => result.output),
        first: results.map((result) => result.first),
        last: results.map((result) => result.last),
    }));
}
